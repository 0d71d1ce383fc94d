#include "runtime/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <memory>
#include <string>
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

// Each item waits until `threads` items are in work, so with fewer threads the job never ends.
struct Meeting {
  explicit Meeting(int of) : threads(of) {}
  const int threads;
  const pid_t caller = gettid();
  std::atomic<int> here{0};
  std::atomic<pid_t> worker{0};  // one of the workers
  static void body(void* context, std::int64_t, std::int64_t) {
    auto& self = *static_cast<Meeting*>(context);
    if (gettid() != self.caller) self.worker = gettid();
    ++self.here;
    while (self.here.load() < self.threads) std::this_thread::yield();
  }
  static pid_t of(ThreadPool& pool) {
    Meeting meeting(pool.num_threads());
    pool.run(meeting.threads, body, &meeting);
    return meeting.worker;
  }
};

std::string status_of(pid_t thread, const std::string& field) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field + ":")) return line.substr(line.find_first_not_of(" \t", field.size() + 1));
  return "";
}

// Waits until the thread sleeps; false after half a minute.
bool falls_asleep(pid_t thread) {
  for (int i = 0; i < 30'000; ++i) {
    if (status_of(thread, "State").starts_with("S")) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

cpu_set_t only(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return set;
}

cpu_set_t affinity_of(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(thread, sizeof set, &set);
  return set;
}

// This thread's affinity, restored at the end.
class Affinity {
 public:
  ~Affinity() { sched_setaffinity(0, sizeof before, &before); }
  const cpu_set_t before = affinity_of(0);
  // The n-th CPU of the original affinity.
  int cpu(int n) const {
    int cpu = 0;
    while (!CPU_ISSET(cpu, &before) || n-- > 0) ++cpu;
    return cpu;
  }
  void pin(int cpu) {
    const cpu_set_t set = only(cpu);
    ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
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
  EXPECT_NE(Meeting::of(pool), 0);
}

// The pauses are as long as an idle worker looks for work, shorter and longer.
TEST(ThreadPool, FindsItsWorkersLookingFallingAsleepAndAsleep) {
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    for (int i = 0; i < 400; ++i) {
      EXPECT_NE(Meeting::of(pool), 0);
      const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(i % 200);
      while (std::chrono::steady_clock::now() < end) continue;
    }
  }
}

TEST(ThreadPool, EndsWhateverItsWorkersDo) {
  for (int i = 0; i < 300; ++i) {
    auto pool = std::make_unique<ThreadPool>(2 + i % 2);
    if (i % 4 != 0) Meeting::of(*pool);
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(i % 200);
    while (std::chrono::steady_clock::now() < end) continue;
  }
}

TEST(ThreadPool, IdleWorkersSleep) {
  for (const int threads : {2, 4}) {
    ThreadPool pool(threads);
    const pid_t worker = Meeting::of(pool);
    ASSERT_TRUE(falls_asleep(worker));
    // A polling worker would have woken up meanwhile.
    const std::string switches = status_of(worker, "voluntary_ctxt_switches");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_NE(switches, "");
    EXPECT_EQ(status_of(worker, "voluntary_ctxt_switches"), switches);
  }
}

TEST(ThreadPool, WorkersKeepOffTheirCallersCpu) {
  if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
  ThreadPool pool(2);
  const pid_t worker = Meeting::of(pool);
  Affinity affinity;
  for (const int n : {0, 1, 0}) {
    const int cpu = affinity.cpu(n);
    affinity.pin(cpu);
    ASSERT_TRUE(falls_asleep(worker));
    EXPECT_EQ(Meeting::of(pool), worker);
    cpu_set_t others = affinity.before, callers = only(cpu);
    CPU_CLR(cpu, &others);
    const cpu_set_t worker_now = affinity_of(worker), caller_now = affinity_of(0);
    EXPECT_TRUE(CPU_EQUAL(&worker_now, &others)) << cpu;
    EXPECT_TRUE(CPU_EQUAL(&caller_now, &callers)) << cpu;
  }
}

TEST(ThreadPool, WorkersStayWhereTheHostPutsThem) {
  if (available_cpus() < 2) GTEST_SKIP() << "needs two CPUs";
  ThreadPool pool(2);
  const pid_t worker = Meeting::of(pool);
  Affinity affinity;
  const auto call_from = [&](int n) {
    affinity.pin(affinity.cpu(n));
    ASSERT_TRUE(falls_asleep(worker));
    EXPECT_EQ(Meeting::of(pool), worker);
  };
  call_from(1);  // with two CPUs the pool gives it the other one
  ASSERT_TRUE(falls_asleep(worker));
  const cpu_set_t chosen = only(affinity.cpu(1));
  ASSERT_EQ(sched_setaffinity(worker, sizeof chosen, &chosen), 0);
  for (const int n : {1, 0, 1}) {
    call_from(n);
    const cpu_set_t now = affinity_of(worker);
    EXPECT_TRUE(CPU_EQUAL(&now, &chosen)) << n;
  }
}

TEST(ThreadPool, LeavesSignalsToTheHost) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  ThreadPool pool(2);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int s = 1; s < 32; ++s) EXPECT_EQ(sigismember(&before, s), sigismember(&after, s)) << s;
  // A worker that took signals would not have them blocked.
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
