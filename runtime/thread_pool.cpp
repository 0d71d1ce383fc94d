#include "runtime/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

namespace flashjit {
namespace {

constexpr int spins_before_sleep = 500;  // some 10 us

}  // namespace

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());  // more CPUs than a cpu_set_t holds
}

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}
SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

ThreadPool::ThreadPool(int num_threads) {
  workers_.reserve(std::max(0, num_threads - 1));
  const SignalsBlocked of_the_host;
  try {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { worker(); });
  } catch (const std::system_error&) {
    // The system gives no more threads: run with those that it gave.
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& w : workers_) w.join();
}

void ThreadPool::work_on(Job& job) {
  for (;;) {
    const std::int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.count) return;
    job.body(job.context, item, item + 1);
  }
}

void ThreadPool::unlink(Job& job) {
  for (Job** link = &first_; *link; link = &(*link)->following) {
    if (*link != &job) continue;
    *link = job.following;
    return;
  }
}

void ThreadPool::run(std::int64_t count, Body body, void* context) {
  if (count <= 0) return;
  if (count == 1 || workers_.empty()) {
    body(context, 0, count);
    return;
  }
  Job job{count, body, context};
  {
    const std::lock_guard lock(mutex_);
    Job** link = &first_;
    while (*link) link = &(*link)->following;
    *link = &job;
  }
  const std::int64_t helpers = std::min<std::int64_t>(count - 1, workers_.size());
  for (std::int64_t i = 0; i < helpers; ++i) wake_.notify_one();
  work_on(job);
  {
    const std::lock_guard lock(mutex_);
    unlink(job);
  }
  // What workers are still at is a piece at most, often over before this thread would be asleep and awake
  // again.
  for (int i = 0; i < spins_before_sleep; ++i) {
    if (job.workers.load(std::memory_order_acquire) == 0) return;
    __builtin_ia32_pause();
  }
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [&] { return job.workers.load(std::memory_order_relaxed) == 0; });
}

void ThreadPool::worker() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || first_; });
    if (stop_) return;
    Job& job = *first_;
    job.workers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    work_on(job);
    lock.lock();
    unlink(job);  // nothing is left of it
    // The caller may return at once and `job` is gone. It sleeps under the lock only.
    if (job.workers.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_all();
  }
}

}  // namespace flashjit
