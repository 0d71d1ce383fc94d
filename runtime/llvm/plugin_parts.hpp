// What is behind the plugin's C table. Inside libflashjit-llvm.so only.
#pragma once

#include <llvm/ADT/SmallVector.h>
#include <pthread.h>

#include <cstddef>
#include <cstdlib>
#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit::llvm_plugin {

// C++ text to a relocatable ELF object (or to assembly if the options say -S). False on errors; `log` gets
// the diagnostics either way. Wants 8 MiB of stack.
bool compile(const flashjit_llvm_source& source, llvm::SmallVectorImpl<char>& code, std::string& log);

// Static constructors are through: from now on the lack of memory can be told to somebody.
void end_of_construction();

// Ends all calls for lack of memory; see Call. malloc, operator new and their kin do so in this library.
[[noreturn]] void exhaust();

// malloc that may fail, for a caller's own thread.
void* try_malloc(std::size_t size);

// One call into LLVM, to be run on a thread of its own: LLVM wants more stack than a caller may have, and a
// thread can be left where LLVM cannot go on.
//
// Neither a fatal error of LLVM nor an allocation without memory returns or throws: Clang's destructors do
// not survive an exception, and LLVM keeps global lists of objects that live on its stacks. Both hand the
// caller its result and put the thread to sleep for ever, with its stack and what it allocated. A caller's
// own thread must not sleep, so it allocates by try_malloc.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  virtual ~Call() { std::free(reserve_); }
  // Null without memory.
  static void* operator new(std::size_t size) noexcept { return try_malloc(size); }
  static void operator delete(void* call) { std::free(call); }

  // Runs `call`, null being one without memory, and gives what flashjit_llvm_plugin_api::compile does. After
  // FLASHJIT_LLVM_OK and _FAILED the call's results may be read until it is released; else it is gone.
  static int execute(Call* call);
  static void release(Call* call);
  // LLVM's words where it could not go on.
  const char* fatal() const { return fatal_; }

  // Makes LLVM's fatal errors end calls rather than the process. To be called by the first call.
  static void install_handlers();

 protected:
  // The work. It reads nothing of the caller's, who may be gone before it ends.
  virtual bool run() = 0;

 private:
  static void* thread_main(void* call);
  static void on_fatal_error(void*, const char* reason, bool);
  void finish(int result);

  static constexpr int unfinished = -1;
  int result_ = unfinished;
  bool abandoned_ = false;  // by its caller; its thread deletes it if it ever ends
  char fatal_[1024] = {};
  void* reserve_ = nullptr;  // for the caller's words about the lack of memory
  pthread_t thread_ = {};
};

}  // namespace flashjit::llvm_plugin
