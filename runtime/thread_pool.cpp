#include "runtime/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <exception>

namespace flashjit {
namespace {

// Going to sleep and being woken takes some 50 us.
constexpr std::chrono::microseconds patience{100};
constexpr int pauses_between_yields = 500;  // some 10 us

template <class Condition>
bool soon(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + patience;
  do {
    for (int i = 0; i < pauses_between_yields; ++i) {
      if (condition()) return true;
      __builtin_ia32_pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

// Spins first: the lock is held for nanoseconds, and
// sleeping until it is free takes a thousand times as long.
void lock_soon(std::unique_lock<std::mutex>& lock) {
  for (int i = 0; i < 100; ++i) {
    if (lock.try_lock()) return;
    __builtin_ia32_pause();
  }
  lock.lock();
}

}  // namespace

int available_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());  // there are more CPUs than a cpu_set_t holds
}

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}
SignalsBlocked::~SignalsBlocked() {
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

ThreadPool::ThreadPool(int num_threads) : most_callers_(available_cpus() - std::max(0, num_threads - 1)) {
  const SignalsBlocked of_the_host;
  for (int i = 1; i < num_threads; ++i) {
    try {
      Worker& worker = workers_.emplace_back();
      worker.thread = std::thread([this, &worker] { work(worker); });
    } catch (const std::exception&) {  // no more threads or memory: the pool has those that it got
      if (!workers_.empty() && !workers_.back().thread.joinable()) workers_.pop_back();
      break;
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  for (Worker& w : workers_) call(w, w.avoided);
  for (Worker& w : workers_) w.thread.join();
}

bool ThreadPool::cpu_for_each() const {
  return callers_.load(std::memory_order_relaxed) <= most_callers_;
}

void ThreadPool::Worker::keep_off(int cpu) {
  const pthread_t self = thread.native_handle();
  cpu_set_t now;
  if (pthread_getaffinity_np(self, sizeof now, &now) != 0) return;
  if (avoided < 0 || !CPU_EQUAL(&now, &given)) allowed = now;  // the affinity that the host gave the thread
  avoided = cpu;
  given = allowed;
  CPU_CLR(cpu, &given);
  if (CPU_COUNT(&given) != 0) pthread_setaffinity_np(self, sizeof given, &given);
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
  callers_.fetch_add(1, std::memory_order_relaxed);
  Job job{count, body, context, sched_getcpu()};
  Worker* called = nullptr;
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    lock_soon(lock);
    Job** link = &first_;
    while (*link) link = &(*link)->following;
    *link = &job;
    for (std::int64_t i = 1; i < count && idle_; ++i) {
      Worker* const worker = idle_;
      idle_ = worker->next_idle;
      worker->next_idle = called;
      called = worker;
    }
  }
  const bool keep_off = cpu_for_each();
  while (called) {
    Worker& worker = *called;
    called = worker.next_idle;  // read first: the worker may be idle again once it is called
    call(worker, keep_off ? job.cpu : worker.avoided);
  }
  work_on(job);
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    lock_soon(lock);
    unlink(job);
  }
  // Workers still have at most one piece each, which often
  // ends before this thread could go to sleep and wake again.
  const auto done = [&] { return job.workers.load(std::memory_order_acquire) == 0; };
  if (!done() && !(cpu_for_each() && soon(done))) {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, done);
  }
  callers_.fetch_sub(1, std::memory_order_relaxed);
}

// Gives work to `worker`, and wakes it on another CPU if it sleeps.
void ThreadPool::call(Worker& worker, int cpu_of_caller) {
  if (worker.state.load(std::memory_order_relaxed) == Worker::asleep && worker.avoided != cpu_of_caller)
    worker.keep_off(cpu_of_caller);
  if (worker.state.exchange(Worker::at_work, std::memory_order_acq_rel) == Worker::asleep)
    worker.state.notify_one();
}

// Waits until the worker is called.
void ThreadPool::be_idle(Worker& self, std::unique_lock<std::mutex>& lock) {
  self.next_idle = idle_;
  idle_ = &self;
  self.state.store(Worker::looking, std::memory_order_relaxed);
  lock.unlock();
  const auto called = [&] { return self.state.load(std::memory_order_acquire) == Worker::at_work; };
  if (!(cpu_for_each() && soon(called))) {
    auto state = Worker::looking;
    if (self.state.compare_exchange_strong(state, Worker::asleep, std::memory_order_acq_rel))
      self.state.wait(Worker::asleep, std::memory_order_acquire);
  }
  lock_soon(lock);
}

void ThreadPool::work(Worker& self) {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (!first_) {
      be_idle(self, lock);
      continue;
    }
    Job& job = *first_;
    job.workers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    if (sched_getcpu() == job.cpu && cpu_for_each()) self.keep_off(job.cpu);
    work_on(job);
    lock_soon(lock);
    unlink(job);  // all its items have been taken
    // The caller may now return, and `job` is gone. (A caller that sleeps does so under the lock.)
    if (job.workers.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_all();
  }
}

}  // namespace flashjit
