// The exported function of libflashjit-llvm.so: one table of C functions over compile() and link().
#include "runtime/llvm/plugin.h"

#include <elf.h>
#include <llvm/Passes/PassPlugin.h>
#include <llvm/Support/ErrorHandling.h>
#include <llvm/Support/TargetSelect.h>
#include <pthread.h>

#include <clang/Basic/Version.h>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <system_error>

#include "runtime/llvm/plugin_parts.hpp"

// The linker puts this at the file's first byte.
extern "C" const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));

namespace flashjit::llvm_plugin {
namespace {

// Fatal errors of LLVM (report_fatal_error, out of memory) end in a handler that must not return. Each guarded() call
// has a place to jump to instead. What LLVM held at that moment is leaked: its destructors do not run. This is the
// plugin's own copy of LLVM, so a host that uses LLVM itself keeps its handlers.
struct Guard {
  std::jmp_buf escape;
  std::string reason;
};
thread_local Guard* active_guard = nullptr;

void on_fatal_error(void*, const char* reason, bool) {
  if (active_guard == nullptr) return;  // LLVM then ends the process: only a thread that is not ours gets here
  active_guard->reason = reason != nullptr ? reason : "unknown";
  std::longjmp(active_guard->escape, 1);
}

// body() -> success. Whatever goes wrong in it becomes false and a line in `log`.
template <class Body>
bool guarded(std::string& log, const Body& body) {
  Guard guard;
  active_guard = &guard;
  bool ok = false;
  if (setjmp(guard.escape) == 0) {
    try {
      ok = body();
    } catch (const std::exception& e) {  // std::bad_alloc: LLVM itself throws nothing
      log += e.what();
      ok = false;
    }
    active_guard = nullptr;
    return ok;
  }
  active_guard = nullptr;
  log += "fatal error in LLVM: " + guard.reason;
  return false;
}

// Clang counts on 8 MiB of stack (clang/Basic/Stack.h); the caller may have far less.
constexpr std::size_t compile_stack_bytes = 8u << 20;

// Runs body() on a thread with that stack.
bool on_large_stack(std::string& log, const std::function<bool()>& body) {
  struct Call {
    std::string& log;
    const std::function<bool()>& body;
    bool ok;
  } call{log, body, false};
  const auto entry = [](void* p) -> void* {
    Call& c = *static_cast<Call*>(p);
    c.ok = guarded(c.log, c.body);
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, compile_stack_bytes);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, entry, &call);
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    log += "cannot start a thread for the compiler: " + std::system_category().message(error);
    return false;
  }
  pthread_join(thread, nullptr);
  return call.ok;
}

// The linker's build ID: differs whenever the plugin or the LLVM linked into it does.
std::string build_id() {
  const char* const base = reinterpret_cast<const char*>(&__ehdr_start);
  const auto* segments = reinterpret_cast<const Elf64_Phdr*>(base + __ehdr_start.e_phoff);
  for (int i = 0; i < __ehdr_start.e_phnum; ++i) {
    if (segments[i].p_type != PT_NOTE) continue;
    const auto padded = [](std::size_t bytes) { return (bytes + 3) & ~std::size_t{3}; };
    for (std::size_t at = 0; at + sizeof(Elf64_Nhdr) <= segments[i].p_filesz;) {
      const auto* note = reinterpret_cast<const Elf64_Nhdr*>(base + segments[i].p_vaddr + at);
      const char* const name = reinterpret_cast<const char*>(note + 1);
      const char* const id = name + padded(note->n_namesz);
      if (note->n_type == NT_GNU_BUILD_ID && note->n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0) {
        std::string hex;
        for (std::size_t b = 0; b < note->n_descsz; ++b) {
          const auto byte = static_cast<unsigned char>(id[b]);
          hex += "0123456789abcdef"[byte >> 4];
          hex += "0123456789abcdef"[byte & 15];
        }
        return hex;
      }
      at += sizeof(Elf64_Nhdr) + padded(note->n_namesz) + padded(note->n_descsz);
    }
  }
  return "unknown";
}

flashjit_llvm_text to_text(const char* data, std::size_t size) {
  flashjit_llvm_text text{static_cast<char*>(std::malloc(size + 1)), size};
  if (text.data == nullptr) return {nullptr, 0};
  std::memcpy(text.data, data, size);
  text.data[size] = 0;
  return text;
}

int compile_entry(const flashjit_llvm_source* source, flashjit_llvm_text* object, flashjit_llvm_text* log) {
  llvm::SmallVector<char, 0> code;
  std::string said;
  const bool ok = on_large_stack(said, [&] { return compile(*source, code, said); });
  *object = ok ? to_text(code.data(), code.size()) : flashjit_llvm_text{};
  *log = to_text(said.data(), said.size());
  return ok && object->data != nullptr ? 0 : 1;
}

int load_entry(const char* object, size_t size, const char* const* entries, size_t num_entries, void** addresses,
               void** handle, flashjit_llvm_text* log) {
  std::string said;
  *handle = nullptr;
  const bool ok = guarded(said, [&] {
    *handle = load({object, size}, {entries, num_entries}, addresses, said);
    return *handle != nullptr;
  });
  *log = to_text(said.data(), said.size());
  return ok ? 0 : 1;
}

void unload_entry(void* handle) {
  std::string said;
  guarded(said, [&] {
    unload(handle);
    return true;
  });
}

void free_text(flashjit_llvm_text* text) {
  std::free(text->data);
  *text = {};
}

}  // namespace
}  // namespace flashjit::llvm_plugin

// Debian's Clang libraries refer to Polly, which is a package of its own and of no use here.
llvm::PassPluginLibraryInfo getPollyPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "none", "", [](llvm::PassBuilder&) {}};
}

extern "C" __attribute__((visibility("default"))) const flashjit_llvm_plugin_api* flashjit_llvm_plugin(
    uint32_t abi_version) {
  using namespace flashjit::llvm_plugin;
  if (abi_version != FLASHJIT_LLVM_PLUGIN_ABI) return nullptr;
  // Never destroyed: kernels may outlive the static objects of this library.
  static const flashjit_llvm_plugin_api* const api = [] {
    LLVMInitializeX86TargetInfo();
    LLVMInitializeX86Target();
    LLVMInitializeX86TargetMC();
    LLVMInitializeX86AsmParser();
    LLVMInitializeX86AsmPrinter();
    llvm::install_fatal_error_handler(on_fatal_error);
    llvm::install_bad_alloc_error_handler(on_fatal_error);
    const std::string identity = clang::getClangFullVersion() + ", build " + build_id();
    return new flashjit_llvm_plugin_api{FLASHJIT_LLVM_PLUGIN_ABI,
                                        to_text(identity.data(), identity.size()).data,
                                        compile_entry,
                                        load_entry,
                                        unload_entry,
                                        free_text};
  }();
  return api;
}
