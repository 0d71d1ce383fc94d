#include "runtime/jobs.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/thread_pool.hpp"

namespace flashjit {

std::size_t run_jobs(std::size_t count, int num_threads, const std::function<void(std::size_t)>& work,
                     const std::function<bool(std::size_t done)>& go_on) {
  std::mutex mutex;
  std::condition_variable changed;
  std::size_t begun = 0, done = 0, running = 0;
  bool stop = false;
  std::exception_ptr failure;
  const auto worker = [&] {
    std::unique_lock lock(mutex);
    while (begun < count && !stop) {
      const std::size_t job = begun++;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        work(job);
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      ++done;
      if (thrown && !failure) failure = thrown;
      stop |= failure != nullptr;
      changed.notify_one();
    }
    --running;
    changed.notify_one();
  };

  std::vector<std::jthread> threads;
  std::unique_lock lock(mutex);
  {
    const SignalsBlocked of_the_host;
    const auto wanted = static_cast<std::size_t>(num_threads > 0 ? num_threads : available_cpus());
    for (; running < std::min(wanted, count); ++running) {
      try {
        threads.emplace_back(worker);
      } catch (const std::system_error&) {  // the system gives no more threads
        if (threads.empty()) throw;
        break;
      }
    }
  }
  // The number of finished jobs that go_on() was told. Jobs that finish during a
  // call of go_on() are told by the next call, even after the last thread has ended.
  std::size_t told = 0;
  while (running > 0 || (go_on && told < done)) {
    if (!go_on || told == done) changed.wait_for(lock, std::chrono::milliseconds(100));
    if (!go_on) continue;
    told = done;
    lock.unlock();
    bool more = false;
    std::exception_ptr thrown;
    try {
      more = go_on(told);
    } catch (...) {
      thrown = std::current_exception();
    }
    lock.lock();
    if (thrown && !failure) failure = thrown;
    stop |= !more;
  }
  lock.unlock();
  threads.clear();
  if (failure) std::rethrow_exception(failure);
  return begun;
}

}  // namespace flashjit
