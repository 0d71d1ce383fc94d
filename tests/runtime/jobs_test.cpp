#include "runtime/jobs.hpp"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace flashjit {
namespace {

TEST(Jobs, EachIsDoneOnce) {
  for (const int threads : {0, 1, 3, 50}) {
    for (const std::size_t count : {0, 1, 2, 40}) {
      std::vector<std::atomic<int>> calls(count);
      std::size_t last = 0;
      EXPECT_EQ(run_jobs(
                    count, threads, [&](std::size_t i) { ++calls[i]; },
                    [&](std::size_t done) {
                      EXPECT_GE(done, last);
                      last = done;
                      return true;
                    }),
                count);
      for (const std::atomic<int>& c : calls) EXPECT_EQ(c, 1);
      EXPECT_EQ(last, count);
    }
  }
}

TEST(Jobs, AreDoneAtOnce) {
  std::atomic<int> here = 0;
  run_jobs(3, 3, [&](std::size_t) {
    ++here;
    while (here < 3) std::this_thread::yield();  // never ends if one waits for another
  });
}

TEST(Jobs, ThoseBegunAreTheFirst) {
  std::vector<std::atomic<int>> calls(100);
  const std::size_t begun = run_jobs(
      calls.size(), 4,
      [&](std::size_t i) {
        ++calls[i];
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      },
      [](std::size_t done) { return done < 5; });
  EXPECT_GE(begun, 5u);
  EXPECT_LT(begun, calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], i < begun ? 1 : 0) << i;
}

TEST(Jobs, AFailureEndsThem) {
  std::atomic<int> calls = 0;
  const auto fail = [&](std::size_t) {
    ++calls;
    throw std::runtime_error("no");
  };
  EXPECT_THROW(run_jobs(100, 2, fail), std::runtime_error);
  EXPECT_LE(calls, 2);
  calls = 0;
  const auto work = [&](std::size_t) {
    ++calls;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  EXPECT_THROW(run_jobs(1000, 2, work, [](std::size_t) -> bool { throw std::runtime_error("no"); }),
               std::runtime_error);
  EXPECT_LT(calls, 1000);
}

TEST(Jobs, LeaveSignalsToTheHost) {
  std::atomic<bool> blocked = false;
  run_jobs(1, 1, [&](std::size_t) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1;
  });
  EXPECT_TRUE(blocked);
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0);
}

}  // namespace
}  // namespace flashjit
