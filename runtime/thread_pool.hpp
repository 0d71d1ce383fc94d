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

// The number of CPUs that this process may run on.
int available_cpus();

// While it lives, new threads are made with all signals
// blocked: the host's signals are for the host's threads.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A pool of num_threads - 1 workers; the caller of run() is the last thread. Any number of threads may
// call run() at once: jobs are served in order of arrival, and each caller always works on its own job.
//
// Idle workers sleep. Before a thread sleeps, it looks for at most 100 us: a worker for another
// job, a caller for the end of its workers' last pieces. After the first 10 us it yields its CPU
// to any thread that wants it. If workers and callers outnumber the CPUs, threads sleep at once.
//
// Workers' affinities keep them off the CPU of their job's caller. Otherwise a
// scheduler that packs threads onto few CPUs, as some virtual machines' do, wakes
// them right there, behind the caller. A caller's affinity is never changed.
class ThreadPool {
 public:
  using Body = void (*)(void* context, std::int64_t begin, std::int64_t end);

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Calls body on single items of [0, count), which begin in ascending order, and returns when
  // all are done. `body` must not throw. Allocates nothing. Holds a mutex for a few instructions
  // to call workers, and again at their end; not if there is only one item or no worker.
  void run(std::int64_t count, Body body, void* context);
  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

 private:
  // Lives on its caller's stack, and is linked into the queue while it has items left.
  struct Job {
    std::int64_t count;
    Body body;
    void* context;
    int cpu;  // CPU of its caller
    std::atomic<std::int64_t> next{0};
    std::atomic<int> workers{0};  // changes under mutex_
    Job* following = nullptr;
  };

  struct alignas(64) Worker {
    enum State { at_work, looking, asleep };
    // Called by the worker itself while it works, else by the caller that took it from the idle workers.
    void keep_off(int cpu);

    std::atomic<State> state{at_work};
    Worker* next_idle = nullptr;
    std::thread thread;
    int avoided = -1;
    cpu_set_t allowed, given;  // given: without `avoided`
  };

  static void work_on(Job& job);
  static void call(Worker& worker, int cpu_of_caller);
  void unlink(Job& job);
  void be_idle(Worker& self, std::unique_lock<std::mutex>& lock);
  void work(Worker& self);
  bool cpu_for_each() const;

  const int most_callers_;  // the most callers with which every thread has a CPU
  std::atomic<int> callers_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
  Job* first_ = nullptr;
  Worker* idle_ = nullptr;  // a stack: the last to become idle is called first, since its CPU is warm
  bool stop_ = false;
  std::deque<Worker> workers_;
};

}  // namespace flashjit
