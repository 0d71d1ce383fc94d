// The exported function of libflashjit-llvm.so: a table of C functions over compile().
#include "runtime/llvm/plugin.h"

#include <elf.h>
#include <llvm/Config/llvm-config.h>
#include <llvm/Support/ErrorHandling.h>
#include <llvm/Support/TargetSelect.h>
#include <pthread.h>
#include <unistd.h>

#include <clang/Basic/Version.h>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>

#if LLVM_VERSION_MAJOR >= 22
#include <llvm/Plugins/PassPlugin.h>
#else
#include <llvm/Passes/PassPlugin.h>
#endif

#include "runtime/llvm/plugin_parts.hpp"

// The linker puts this at the file's first byte.
extern "C" const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));

namespace flashjit::llvm_plugin {
namespace {

// Clang counts on 8 MiB of stack (clang/Basic/Stack.h); the caller may have far less.
constexpr std::size_t stack_bytes = 8u << 20;

// One call into LLVM, on a thread of its own. Two reasons: the stack, and fatal errors (report_fatal_error,
// for example an instruction that cannot be selected). Those end in a handler that must not return, or LLVM
// ends the process, and must not unwind either: LLVM keeps global lists of objects that live on its stacks.
// So the handler hands the caller its error and sleeps for ever: the stack, and what the call had allocated,
// stay as they are. The handler is that of the plugin's own copy of LLVM: a host that uses LLVM itself keeps
// its own.
struct Call {
  const std::function<bool(std::string& log)>& body;
  std::string log;
  bool ok = false;
  bool fatal = false;
  char reason[1024] = {};

  // Not a semaphore: thread sanitizers know these even in code that they did not compile.
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;

  void finish() {
    const std::lock_guard lock(mutex);
    done = true;
    changed.notify_one();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
};
thread_local Call* this_call = nullptr;
// Set when an allocation failed: std::bad_alloc has then left frames that LLVM's lists still point to.
std::atomic<bool> exhausted = false;

void on_fatal_error(void*, const char* reason, bool) {
  Call* const call = this_call;
  if (call == nullptr)
    return;  // a thread that Clang started for deep recursion in the front end: nothing fatal there
  std::snprintf(call->reason, sizeof(call->reason), "%s", reason != nullptr ? reason : "unknown");
  call->fatal = true;
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  call->finish();
  for (;;) pause();
}

void* run_call(void* argument) {
  Call& call = *static_cast<Call*>(argument);
  this_call = &call;
  try {
    call.ok = call.body(call.log);
  } catch (const std::exception& e) {
    exhausted = true;
    std::snprintf(call.reason, sizeof(call.reason), "%s", e.what());
  }
  call.finish();
  return nullptr;
}

// body's success. Whatever goes wrong in it becomes false and text in `log`.
bool on_own_thread(std::string& log, const std::function<bool(std::string& log)>& body) {
  if (exhausted) {
    log = "the compiler ran out of memory before and cannot be used again in this process";
    return false;
  }
  auto call = std::make_unique<Call>(body);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, stack_bytes);
  pthread_t thread;
  const int error = pthread_create(&thread, &attributes, run_call, call.get());
  pthread_attr_destroy(&attributes);
  if (error != 0) {
    log = "cannot start a thread for the compiler: " + std::system_category().message(error);
    return false;
  }
  call->wait();
  log = std::move(call->log);
  log += call->reason;
  if (call->fatal) {
    pthread_detach(thread);
    call.release();  // NOLINT(bugprone-unused-return-value): the sleeping thread keeps it
    return false;
  }
  pthread_join(thread, nullptr);
  return call->ok;
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
  const bool ok = on_own_thread(said, [&](std::string& words) { return compile(*source, code, words); });
  *object = ok ? to_text(code.data(), code.size()) : flashjit_llvm_text{};
  *log = to_text(said.data(), said.size());
  return ok && object->data != nullptr ? 0 : 1;
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
    return new flashjit_llvm_plugin_api{
        FLASHJIT_LLVM_PLUGIN_ABI, to_text(identity.data(), identity.size()).data, compile_entry, free_text};
  }();
  return api;
}
