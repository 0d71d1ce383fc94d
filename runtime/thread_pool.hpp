// The engine's own threads for CPU kernels.
#pragma once

#include <sched.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

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

// num_threads - 1 workers; the caller of run() is the last one. Any number of threads may call run() at once:
// jobs are served in order of arrival, each caller always working on its own.
//
// Idle workers sleep. Before that, who has run out of work looks for more for at most 100 us: a worker for
// another job, a caller for the end of its workers' last pieces. After the first 10 us it gives way to any
// thread that wants its CPU. Where workers and callers are more than CPUs, it sleeps at once.
//
// Workers are kept off the CPU of their job's caller, by their own affinity: a scheduler that packs threads
// onto few CPUs, as some virtual machines' do, wakes them right there, behind the caller. A caller's is its
// own.
class ThreadPool {
 public:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body on single items of [0, count), in ascending order of their start, and returns when all are
  // done. Allocates nothing; holds a mutex for a few instructions, to call workers and when they are done,
  // unless all is left to this thread: one item, or no workers. `body` must not throw.
  void run(std::int64_t count, Body body, void* context);
  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  // Lives on the stack of its caller. Linked into the queue while it has items left.
  struct Job {
    std::int64_t count;
    Body body;
    void* context;
    int cpu;  // of its caller
    std::atomic<std::int64_t> next{0};
    std::atomic<int> workers{0};  // changes under mutex_
    Job* following = nullptr;
  };

  struct alignas(64) Worker {
    enum State { at_work, looking, asleep };
    // For itself when it works, else for the caller that took it from the idle ones.
    void keep_off(int cpu);

    std::atomic<State> state{at_work};
    Worker* next_idle = nullptr;
    std::thread thread;
    int avoided = -1;
    cpu_set_t allowed, given;  // without `avoided`
  };

  static void work_on(Job& job);
  static void call(Worker& worker, int cpu_of_caller);
  void unlink(Job& job);
  void be_idle(Worker& self, std::unique_lock<std::mutex>& lock);
  void work(Worker& self);
  bool cpu_for_each() const;

  const int most_callers_;  // with a CPU for every thread
  std::atomic<int> callers_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  Job* first_ = nullptr;
  Worker* idle_ = nullptr;  // last come, first called: its CPU is warm
  bool stop_ = false;
  std::deque<Worker> workers_;
};

}  // namespace flashjit
