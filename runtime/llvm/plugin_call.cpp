// Calls into LLVM: their threads, and their end if memory runs out.
#include <llvm/Support/ErrorHandling.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>

#include "runtime/llvm/plugin_parts.hpp"

namespace flashjit::llvm_plugin {
namespace {

// Clang expects 8 MiB of stack (clang/Basic/Stack.h).
constexpr std::size_t stack_bytes = 8u << 20;
constexpr std::size_t reserve_bytes = 64u << 10;

// A mutex and a condition variable instead of semaphores: thread
// sanitizers know these even in code that they did not compile.
std::mutex mutex;
std::condition_variable changed;
// Set when an allocation has failed. Its thread sleeps, perhaps holding locks of LLVM
// that other calls wait for. So all calls in flight end with it, and no new ones begin.
bool exhausted = false;

thread_local Call* this_call = nullptr;  // also null on threads that Clang starts for deep recursion

constexpr std::chrono::milliseconds between_questions(5);

// Not inlined: the thread-local storage must not be touched before the function is called.
[[gnu::noinline]] void set_this_call(Call* call) {
  this_call = call;
}

// Makes the calling thread one of `call`, or of none if it is null. glibc ends the process if a thread's
// first access to thread-local storage finds no memory, so this checks for room first. Returns false if there
// is none.
bool enter(Call* call) {
  void* volatile room = try_malloc(reserve_bytes);
  if (room == nullptr) return false;
  try_free(room);
  set_this_call(call);
  return true;
}

struct Counting {
  explicit Counting(bool counts) : count(counts ? 1 : 0) { watched_calls += count; }
  ~Counting() { watched_calls -= count; }
  Counting(const Counting&) = delete;
  Counting& operator=(const Counting&) = delete;
  const int count;
};

[[noreturn]] void sleep_for_ever() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  for (;;) pause();
}

}  // namespace

std::atomic<int> watched_calls = 0;

void count_memory(std::ptrdiff_t bytes) {
  if (Call* const call = this_call)
    call->bytes_.store(call->bytes_.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

void exhaust() {
  {
    const std::lock_guard lock(mutex);
    exhausted = true;
    changed.notify_all();
  }
  sleep_for_ever();
}

void Call::on_fatal_error(void*, const char* reason, bool) {
  Call* const call = this_call;
  // Without a call this is one of Clang's own threads, for which a call waits
  // for ever. Their only fatal error is that another thread cannot be started.
  if (call == nullptr) exhaust();
  std::snprintf(call->fatal_, sizeof(call->fatal_), "%s", reason != nullptr ? reason : "unknown");
  call->finish(FLASHJIT_LLVM_FAILED);
  sleep_for_ever();
}

void Call::install_handlers() {
  // A child made by fork() has none of the threads that wait. Calls of its parent that were under way are
  // gone, with what they took. fork() does not wait for the mutex: the thread that forks would hold it and
  // wait for flashjit's lock of opening, whose owner starts the plugin and waits for the mutex.
  pthread_atfork(nullptr, nullptr, [] {
    new (&mutex) std::mutex;
    new (&changed) std::condition_variable;
  });
  llvm::install_fatal_error_handler(on_fatal_error);
  llvm::install_bad_alloc_error_handler([](void*, const char*, bool) { exhaust(); });
  // Sets the handler of the plugin's own C++ runtime. No frame here
  // catches exceptions, so the handler runs before any frame is left.
  std::set_terminate(exhaust);
}

void Call::finish(int result) {
  std::unique_lock lock(mutex);
  result_ = result;
  changed.notify_all();
  if (!abandoned_) return;
  lock.unlock();
  if (*fatal_ == 0) delete this;
}

void* Call::thread_main(void* argument) {
  Call& call = *static_cast<Call*>(argument);
  if (!enter(&call)) {
    call.finish(FLASHJIT_LLVM_NO_MEMORY);
    return nullptr;
  }
  call.finish(call.run() ? FLASHJIT_LLVM_OK : FLASHJIT_LLVM_FAILED);
  return nullptr;
}

void Call::wait(std::unique_lock<std::mutex>& lock, const flashjit_llvm_watch* watch) {
  const auto over = [this] { return result_ != unfinished || exhausted; };
  while (watch != nullptr && !ends_ && !changed.wait_for(lock, between_questions, over)) {
    lock.unlock();
    const auto bytes = std::max<std::ptrdiff_t>(bytes_.load(std::memory_order_relaxed), 0);
    ends_ = watch->ends(watch->user, static_cast<std::uint64_t>(bytes)) != 0;
    lock.lock();
  }
  changed.wait(lock, over);
}

int Call::execute(Call* call, const flashjit_llvm_watch* watch) {
  if (call == nullptr) return FLASHJIT_LLVM_NO_MEMORY;
  call->reserve_ = try_malloc(reserve_bytes);
  // This thread frees what calls leave, perhaps while another call's memory is counted.
  const bool ready = call->reserve_ != nullptr && enter(nullptr);
  const Counting counting(watch != nullptr);
  std::unique_lock lock(mutex);
  int result = FLASHJIT_LLVM_NO_MEMORY;
  if (exhausted) {
    result = FLASHJIT_LLVM_EXHAUSTED;
  } else if (ready) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack_bytes);
    const int error = pthread_create(&call->thread_, &attributes, thread_main, call);
    pthread_attr_destroy(&attributes);
    if (error == 0) {
      call->wait(lock, watch);
      if (call->result_ == unfinished) {
        call->abandoned_ = true;
        try_free(call->reserve_);
        call->reserve_ = nullptr;
        pthread_detach(call->thread_);
        return FLASHJIT_LLVM_EXHAUSTED;
      }
      result = call->result_;
      if (call->ends_ && result != FLASHJIT_LLVM_NO_MEMORY) {
        lock.unlock();
        release(call);
        return FLASHJIT_LLVM_ENDED;
      }
      if (result != FLASHJIT_LLVM_NO_MEMORY) return result;
      lock.unlock();
      pthread_join(call->thread_, nullptr);
    }
  }
  delete call;
  return result;
}

void Call::release(Call* call) {
  // A sleeping thread keeps its call.
  if (*call->fatal_ != 0) {
    pthread_detach(call->thread_);
    return;
  }
  pthread_join(call->thread_, nullptr);
  delete call;
}

}  // namespace flashjit::llvm_plugin
