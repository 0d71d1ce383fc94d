// The parts of the plugin behind its C interface. For use inside libflashjit-llvm.so only.
#pragma once

#include <llvm/ADT/SmallVector.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

#include "runtime/llvm/plugin.h"

namespace flashjit::llvm_plugin {

// Compiles C++ text to a relocatable ELF object, or to assembly if the options say -S.
// Returns false on errors; `log` gets the diagnostics either way. Needs 8 MiB of stack.
// Once `ends` is true, it leaves out what it can and returns soon.
bool compile(const flashjit_llvm_source& source, const std::atomic<bool>& ends,
             llvm::SmallVectorImpl<char>& code, std::string& log);

// Says that static constructors have ended: from now on a call can report that memory ran out.
void end_of_construction();

// Ends all calls for lack of memory; see Call. This library's malloc and operator new do so.
[[noreturn]] void exhaust();

// A malloc that may return null, for callers' own threads, and its free. Neither counts.
void* try_malloc(std::size_t size);
void try_free(void* memory);

// Adds to the memory of the call whose thread this is, if the call is watched.
void count_memory(std::ptrdiff_t bytes);
// Whether a call is watched: nothing is counted otherwise.
extern std::atomic<int> watched_calls;

// One call into LLVM, which runs on a thread of its own. LLVM needs more stack
// than a caller may have, and a thread can be abandoned when LLVM cannot go on.
//
// After a fatal error of LLVM or a failed allocation, the call neither returns nor throws:
// Clang's destructors do not survive an exception, and LLVM keeps global lists of objects
// on its stacks. The caller gets its result, and the thread sleeps for ever with its stack
// and its memory. A caller's own thread must not sleep, so it allocates by try_malloc.
class Call {
 public:
  Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  virtual ~Call() { try_free(reserve_); }
  // Returns null if there is no memory.
  static void* operator new(std::size_t size) noexcept { return try_malloc(size); }
  static void operator delete(void* call) { try_free(call); }

  // Runs `call` and returns a result of flashjit_llvm_plugin_api::compile; a null `call`
  // means that there was no memory for it. After FLASHJIT_LLVM_OK and _FAILED the call's
  // results may be read until release(); after any other result the call is gone.
  //
  // `watch`, which may be null, ends the call with FLASHJIT_LLVM_ENDED once the work has left out what it
  // can.
  static int execute(Call* call, const flashjit_llvm_watch* watch = nullptr);
  static void release(Call* call);
  // LLVM's message if it could not go on.
  const char* fatal() const { return fatal_; }

  // Makes LLVM's fatal errors end calls instead of the process. The first call must call it.
  static void install_handlers();

 protected:
  // The work. It must not read the caller's memory: the caller may be gone before it ends.
  virtual bool run() = 0;
  // Whether the work is to end.
  std::atomic<bool> ends_ = false;

 private:
  friend void count_memory(std::ptrdiff_t bytes);
  // Waits for the call's end, asking the watch meanwhile.
  void wait(std::unique_lock<std::mutex>& lock, const flashjit_llvm_watch* watch);
  static void* thread_main(void* call);
  static void on_fatal_error(void*, const char* reason, bool);
  void finish(int result);

  static constexpr int unfinished = -1;
  int result_ = unfinished;
  bool abandoned_ = false;  // the caller has gone; the thread deletes the call if it ever ends
  char fatal_[1024] = {};
  void* reserve_ = nullptr;  // freed when memory runs out, so that the caller can report it
  pthread_t thread_ = {};
  std::atomic<std::ptrdiff_t> bytes_ = 0;  // of memory that the thread has allocated and not freed
};

}  // namespace flashjit::llvm_plugin
