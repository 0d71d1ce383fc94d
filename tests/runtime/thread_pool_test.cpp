#include "runtime/thread_pool.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <numeric>
#include <thread>
#include <vector>

namespace flashjit {
namespace {

struct Counts {
  explicit Counts(std::size_t n) : calls(n) {}
  std::vector<std::atomic<int>> calls;
  static void body(void* context, std::int64_t begin, std::int64_t end) {
    auto& self = *static_cast<Counts*>(context);
    for (; begin < end; ++begin) self.calls[begin].fetch_add(1);
  }
  void expect_each_once() {
    for (auto& c : calls) ASSERT_EQ(c.load(), 1);
  }
};

TEST(ThreadPool, RunsEveryItemOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    for (const int count : {0, 1, 2, 7, 1000}) {
      Counts counts(count);
      pool.run(count, Counts::body, &counts);
      counts.expect_each_once();
    }
  }
}

TEST(ThreadPool, ServesSeveralCallersAtOnce) {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t)
    callers.emplace_back([&pool] {
      for (int i = 0; i < 200; ++i) {
        Counts counts(37);
        pool.run(37, Counts::body, &counts);
        counts.expect_each_once();
      }
    });
  for (auto& c : callers) c.join();
}

TEST(ThreadPool, UsesItsWorkers) {
  ThreadPool pool(2);
  // Each item waits until both are being worked on: a pool of one thread would never end.
  struct Meeting {
    std::atomic<int> here{0};
    static void body(void* context, std::int64_t begin, std::int64_t end) {
      auto& self = *static_cast<Meeting*>(context);
      for (; begin < end; ++begin) {
        ++self.here;
        while (self.here.load() < 2) std::this_thread::yield();
      }
    }
  } meeting;
  pool.run(2, Meeting::body, &meeting);
  EXPECT_EQ(meeting.here.load(), 2);
}

TEST(ThreadPool, LeavesSignalsToTheHost) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  ThreadPool pool(2);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int s = 1; s < 32; ++s) EXPECT_EQ(sigismember(&before, s), sigismember(&after, s)) << s;
  // A worker that took the signal would not have it blocked.
  struct Masks {
    std::thread::id host = std::this_thread::get_id();
    std::atomic<int> seen{0}, unblocked{0};
    static void body(void* context, std::int64_t, std::int64_t) {
      auto& self = *static_cast<Masks*>(context);
      if (std::this_thread::get_id() != self.host) {
        sigset_t mask;
        pthread_sigmask(SIG_SETMASK, nullptr, &mask);
        if (!sigismember(&mask, SIGINT) || !sigismember(&mask, SIGCHLD)) ++self.unblocked;
      }
      ++self.seen;
      while (self.seen.load() < 2) std::this_thread::yield();
    }
  } masks;
  pool.run(2, Masks::body, &masks);
  EXPECT_EQ(masks.unblocked.load(), 0);
}

}  // namespace
}  // namespace flashjit
