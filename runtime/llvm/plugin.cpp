// The exported function of libflashjit-llvm.so; it returns a table of C functions around compile().
#include "runtime/llvm/plugin.h"

#include <elf.h>
#include <llvm/Config/llvm-config.h>
#include <llvm/Support/TargetSelect.h>

#include <clang/Basic/Version.h>
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#if LLVM_VERSION_MAJOR >= 22
#include <llvm/Plugins/PassPlugin.h>
#else
#include <llvm/Passes/PassPlugin.h>
#endif

#include "runtime/llvm/plugin_parts.hpp"

// The linker defines this symbol at the file's first byte.
extern "C" const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));

namespace flashjit::llvm_plugin {
namespace {

// The linker's build ID. It differs whenever the plugin or the LLVM linked into it differs.
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

// A text of both parts; without data if there is no memory for it.
flashjit_llvm_text to_text(llvm::StringRef first, llvm::StringRef second = {}) {
  const std::size_t size = first.size() + second.size();
  flashjit_llvm_text text{static_cast<char*>(try_malloc(size + 1)), size};
  if (text.data == nullptr) return {nullptr, 0};
  std::copy(first.begin(), first.end(), text.data);
  std::copy(second.begin(), second.end(), text.data + first.size());
  text.data[size] = 0;
  return text;
}

// Copies items into memory one after another; with a null pointer for memory it only counts their bytes.
class Packer {
 public:
  explicit Packer(char* memory) : memory_(memory) {}
  template <class T>
  T* add(const T* items, std::size_t count) {
    T* const place = memory_ != nullptr ? reinterpret_cast<T*>(memory_ + size_) : nullptr;
    if (place != nullptr) std::copy_n(items, count, place);
    size_ += (count * sizeof(T) + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) *
             alignof(std::max_align_t);
    return place;
  }
  // Adds a text with its terminator.
  const char* add(const char* text) { return text != nullptr ? add(text, std::strlen(text) + 1) : nullptr; }
  std::size_t size() const { return size_; }

 private:
  char* memory_;
  std::size_t size_ = 0;
};

// Copies `source` and everything that it points to into `memory`. Returns the number of bytes.
std::size_t pack(flashjit_llvm_source source, char* memory) {
  Packer packer(memory);
  auto* const packed = packer.add(&source, 1);
  auto* const files = packer.add(source.files, source.num_files);
  auto* const options = packer.add(source.options, source.num_options);
  for (std::size_t i = 0; i < source.num_files; ++i) {
    const flashjit_llvm_file& file = source.files[i];
    const flashjit_llvm_file copy{packer.add(file.name), packer.add(file.data, file.size), file.size};
    if (files != nullptr) files[i] = copy;
  }
  for (std::size_t i = 0; i < source.num_options; ++i) {
    const char* const option = packer.add(source.options[i]);
    if (options != nullptr) options[i] = option;
  }
  const char* const passes = packer.add(source.passes);
  if (packed != nullptr) *packed = {files, source.num_files, options, source.num_options, passes};
  return packer.size();
}

class Compile final : public Call {
 public:
  ~Compile() override { try_free(memory_); }

  // A call that holds a copy of the source; null if there is no memory.
  static Compile* of(const flashjit_llvm_source& source) {
    auto* const call = new Compile;
    if (call == nullptr) return nullptr;
    call->memory_ = static_cast<char*>(try_malloc(pack(source, nullptr)));
    if (call->memory_ == nullptr) {
      delete call;
      return nullptr;
    }
    pack(source, call->memory_);
    return call;
  }

  llvm::SmallVector<char, 0> code;
  std::string log;

 private:
  bool run() override { return compile(*reinterpret_cast<flashjit_llvm_source*>(memory_), ends_, code, log); }

  char* memory_ = nullptr;  // the packed source
};

int compile_entry(const flashjit_llvm_source* source, const flashjit_llvm_watch* watch,
                  flashjit_llvm_text* object, flashjit_llvm_text* log) {
  *object = *log = {};
  Compile* const call = Compile::of(*source);
  int result = Call::execute(call, watch);
  if (result != FLASHJIT_LLVM_OK && result != FLASHJIT_LLVM_FAILED) return result;
  if (result == FLASHJIT_LLVM_OK) {
    *object = to_text({call->code.data(), call->code.size()});
    if (object->data == nullptr) result = FLASHJIT_LLVM_NO_MEMORY;
  }
  *log = to_text(call->log, call->fatal());
  Call::release(call);
  return result;
}

void free_text(flashjit_llvm_text* text) {
  try_free(text->data);
  *text = {};
}

char identity[256];

class Start final : public Call {
  bool run() override {
    install_handlers();
    LLVMInitializeX86TargetInfo();
    LLVMInitializeX86Target();
    LLVMInitializeX86TargetMC();
    LLVMInitializeX86AsmParser();
    LLVMInitializeX86AsmPrinter();
    const std::string name = clang::getClangFullVersion() + ", build " + build_id();
    std::snprintf(identity, sizeof(identity), "%s", name.c_str());
    return true;
  }
};

}  // namespace
}  // namespace flashjit::llvm_plugin

// Debian's Clang libraries refer to Polly, which is a package of its own and not needed here.
llvm::PassPluginLibraryInfo getPollyPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "none", "", [](llvm::PassBuilder&) {}};
}

extern "C" __attribute__((visibility("default"))) const flashjit_llvm_plugin_api* flashjit_llvm_plugin(
    uint32_t abi_version) {
  using namespace flashjit::llvm_plugin;
  end_of_construction();
  if (abi_version != FLASHJIT_LLVM_PLUGIN_ABI) return nullptr;
  static flashjit_llvm_plugin_api api{FLASHJIT_LLVM_PLUGIN_ABI, nullptr, compile_entry, free_text};
  static std::mutex starting;
  const std::lock_guard lock(starting);
  if (api.identity == nullptr) {
    auto* const start = new Start;
    if (Call::execute(start) == FLASHJIT_LLVM_OK) {
      Call::release(start);
      api.identity = identity;
    }
  }
  return &api;
}
