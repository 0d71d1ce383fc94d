// Relocatable objects to callable code with JITLink, the linker of LLVM's ORC. Each object is linked by
// itself against the functions below: kernels share no session, symbol table or lock, and unloading one frees
// all that it took.
#include <llvm/ExecutionEngine/JITLink/JITLink.h>
#include <llvm/Support/Process.h>
#include <math.h>
#include <string.h>

#include <iterator>
#include <memory>
#include <utility>

#include "runtime/llvm/plugin_parts.hpp"

namespace flashjit::llvm_plugin {
namespace {

using llvm::jitlink::JITLinkMemoryManager;
using llvm::jitlink::LinkGraph;
using llvm::orc::ExecutorAddr;
using llvm::orc::ExecutorSymbolDef;

// All that a kernel may call: what Clang itself emits calls to, and functions of libm that have no
// instruction.
void* callable(llvm::StringRef name) {
  static const std::pair<llvm::StringRef, void*> functions[] = {
      {"memcpy", (void*)&memcpy}, {"memmove", (void*)&memmove}, {"memset", (void*)&memset},
      {"memcmp", (void*)&memcmp}, {"expf", (void*)&expf},       {"exp2f", (void*)&exp2f},
      {"logf", (void*)&logf},     {"log2f", (void*)&log2f},     {"log1pf", (void*)&log1pf},
      {"powf", (void*)&powf},     {"fmodf", (void*)&fmodf},     {"tanhf", (void*)&tanhf},
      {"erff", (void*)&erff},     {"sinf", (void*)&sinf},       {"cosf", (void*)&cosf},
  };
  for (const auto& [known, address] : functions) {
    if (known == name) return address;
  }
  return nullptr;
}

#if LLVM_VERSION_MAJOR >= 20
llvm::StringRef text_of(const llvm::orc::SymbolStringPtr& name) {
  return *name;
}
#else
llvm::StringRef text_of(llvm::StringRef name) {
  return name;
}
#endif

JITLinkMemoryManager& memory_manager() {
  // Never destroyed: kernels may outlive the static objects of this library.
  static auto& manager =
      *new llvm::jitlink::InProcessMemoryManager(llvm::sys::Process::getPageSizeEstimate());
  return manager;
}

// What becomes of one object. link() runs every callback before it returns.
struct Result {
  llvm::ArrayRef<const char*> entries;
  void** addresses;
  std::string error;
  JITLinkMemoryManager::FinalizedAlloc memory;
};

class LinkContext : public llvm::jitlink::JITLinkContext {
 public:
  explicit LinkContext(Result& result) : JITLinkContext(nullptr), result_(result) {}

  JITLinkMemoryManager& getMemoryManager() override { return memory_manager(); }
  void notifyFailed(llvm::Error error) override { result_.error = llvm::toString(std::move(error)); }
  void notifyFinalized(JITLinkMemoryManager::FinalizedAlloc memory) override {
    result_.memory = std::move(memory);
  }

  void lookup(const LookupMap& symbols,
              std::unique_ptr<llvm::jitlink::JITLinkAsyncLookupContinuation> proceed) override {
    llvm::jitlink::AsyncLookupResult found;
    std::string missing;
    for (const auto& [name, flags] : symbols) {
      if (void* const address = callable(text_of(name))) {
        found[name] = ExecutorSymbolDef(ExecutorAddr::fromPtr(address), llvm::JITSymbolFlags::Exported);
      } else {
        missing += (missing.empty() ? "" : ", ") + text_of(name).str();
      }
    }
    if (!missing.empty()) return proceed->run(failure("kernels may not refer to: " + missing));
    proceed->run(std::move(found));
  }

  llvm::Error notifyResolved(LinkGraph& graph) override {
    for (const auto& section : graph.sections()) {
      if (section.getName().starts_with(".init_array") || section.getName().starts_with(".ctors"))
        return failure("kernels may not have static initialisers");
    }
    for (std::size_t i = 0; i < result_.entries.size(); ++i) {
      result_.addresses[i] = nullptr;
      for (const auto* symbol : graph.defined_symbols()) {
        if (symbol->hasName() && text_of(symbol->getName()) == result_.entries[i])
          result_.addresses[i] = symbol->getAddress().toPtr<void*>();
      }
      if (result_.addresses[i] == nullptr)
        return failure(std::string("the object has no function ") + result_.entries[i]);
    }
    return llvm::Error::success();
  }

 private:
  static llvm::Error failure(const std::string& message) {
    return llvm::make_error<llvm::StringError>(message, llvm::inconvertibleErrorCode());
  }

  Result& result_;
};

auto parse(llvm::StringRef object) {
  const llvm::MemoryBufferRef buffer(object, "kernel");
#if LLVM_VERSION_MAJOR >= 20
  return llvm::jitlink::createLinkGraphFromObject(buffer, std::make_shared<llvm::orc::SymbolStringPool>());
#else
  return llvm::jitlink::createLinkGraphFromObject(buffer);
#endif
}

}  // namespace

void* load(llvm::StringRef object, llvm::ArrayRef<const char*> entries, void** addresses, std::string& log) {
  auto graph = parse(object);
  if (!graph) {
    log += llvm::toString(graph.takeError());
    return nullptr;
  }
  Result result{entries, addresses, {}, {}};
  llvm::jitlink::link(std::move(*graph), std::make_unique<LinkContext>(result));
  if (!result.memory) {
    log += result.error;
    return nullptr;
  }
  return new JITLinkMemoryManager::FinalizedAlloc(std::move(result.memory));
}

void unload(void* handle) {
  const std::unique_ptr<JITLinkMemoryManager::FinalizedAlloc> memory(
      static_cast<JITLinkMemoryManager::FinalizedAlloc*>(handle));
  llvm::consumeError(memory_manager().deallocate(std::move(*memory)));
}

}  // namespace flashjit::llvm_plugin
