// The engine's own threads for CPU kernels.
#pragma once

#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace flashjit {

// CPUs that this process may run on.
int available_cpus();

// Threads made while it lives get no signals: the host's are for the host's threads.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// num_threads - 1 workers; the caller of run() is the last one. Idle workers sleep. Any number of threads may
// call run() at once: jobs are served in order of arrival, each caller always working on its own.
class ThreadPool {
 public:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body on single items of [0, count), in ascending order of their start, and returns when all are
  // done. Allocates nothing. `body` must not throw.
  void run(std::int64_t count, Body body, void* context);
  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  // Lives on the stack of its caller. Linked into the queue while it has items left.
  struct Job {
    std::int64_t count;
    Body body;
    void* context;
    std::atomic<std::int64_t> next{0};
    std::atomic<int> workers{0};  // changes under mutex_
    Job* following = nullptr;
  };

  static void work_on(Job& job);
  void unlink(Job& job);
  void worker();

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  Job* first_ = nullptr;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace flashjit
