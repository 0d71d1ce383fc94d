// A fleet that starts at once, simulated: hosts follow FetchPlan by a clock of the simulation. Run by hand,
// `remote_cache_test --gtest_filter=Fleet.*` prints the figures of cache/remote.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <queue>
#include <random>
#include <vector>

#include "cache/fetch_plan.hpp"

namespace flashjit::testing {
namespace {

using std::chrono::milliseconds;

struct FleetOptions {
  int hosts = 10'000, kernels = 40;
  double start = 60'000;   // all start within these milliseconds
  double compile = 2'000;  // milliseconds of a compile
  double answer = 1;       // of a request
  bool leases = true;
  bool same_order = true;  // all ask for the kernels in the same order
  int deaths = 0;          // of hosts, in the middle of the first compiles
};

struct FleetResult {
  long requests = 0, compiles = 0;
  double last = 0;           // when the last host has its kernels
  double most_a_second = 0;  // requests
};

class SimulatedFleet {
 public:
  explicit SimulatedFleet(const FleetOptions& options) : options_(options) {}

  FleetResult run() {
    hosts_.resize(static_cast<std::size_t>(options_.hosts));
    for (std::size_t i = 0; i < hosts_.size(); ++i) {
      Host& host = hosts_[i];
      for (int k = 0; k < options_.kernels; ++k) host.todo.push_back(k);
      if (!options_.same_order) std::shuffle(host.todo.begin(), host.todo.end(), random_);
      host.plan = FetchPlan({}, options_.leases);
      at(share() * options_.start, i);
    }
    while (!events_.empty()) {
      const auto [time, host] = events_.top();
      events_.pop();
      now_ = time;
      step(host);
    }
    for (const auto& [second, count] : by_second_)
      result_.most_a_second = std::max(result_.most_a_second, static_cast<double>(count));
    return result_;
  }

 private:
  struct Host {
    std::vector<int> todo;  // the last is next
    FetchPlan plan{{}, false};
    bool compiles = false;
  };

  double share() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  void at(double time, std::size_t host) { events_.emplace(time, host); }
  void request() {
    ++result_.requests;
    ++by_second_[static_cast<long>(now_ / 1000)];
  }

  void step(std::size_t i) {
    Host& host = hosts_[i];
    const int kernel = host.todo.back();
    if (host.compiles) {  // its compile ends now
      host.compiles = false;
      request();
      objects_.try_emplace(kernel, now_ + options_.answer);
      if (host.plan.leased()) {
        request();
        leases_.erase(kernel);
      }
      return next(i);
    }
    switch (host.plan.step()) {
      case FetchPlan::Step::get: {
        request();
        const auto found = objects_.find(kernel);
        host.plan.answer(found != objects_.end() && found->second <= now_);
        return at(now_ + options_.answer, i);
      }
      case FetchPlan::Step::lease: {
        if (!options_.leases) {
          host.plan.give_up();
          return at(now_, i);
        }
        request();
        const auto taken = leases_.find(kernel);
        const bool free = taken == leases_.end() || taken->second < now_;
        if (free) leases_[kernel] = now_ + static_cast<double>(FetchLimits().lease.count());
        host.plan.answer(free);
        return at(now_ + options_.answer, i);
      }
      case FetchPlan::Step::wait: {
        const milliseconds pause = host.plan.pause(share());
        host.plan.waited(pause);
        return at(now_ + static_cast<double>(pause.count()), i);
      }
      case FetchPlan::Step::use:
        if (host.plan.leased()) {
          request();
          leases_.erase(kernel);
        }
        return next(i);
      case FetchPlan::Step::make:
        ++result_.compiles;
        if (result_.compiles <= options_.deaths) return;
        host.compiles = true;
        return at(now_ + options_.compile, i);
    }
  }

  void next(std::size_t i) {
    Host& host = hosts_[i];
    host.todo.pop_back();
    if (host.todo.empty()) {
      result_.last = std::max(result_.last, now_);
      return;
    }
    host.plan = FetchPlan({}, options_.leases);
    at(now_ + options_.answer, i);
  }

  const FleetOptions options_;
  std::mt19937 random_{50};
  std::vector<Host> hosts_;
  std::map<int, double> objects_, leases_;  // since when; until when
  std::map<long, long> by_second_;
  std::priority_queue<std::pair<double, std::size_t>, std::vector<std::pair<double, std::size_t>>,
                      std::greater<>>
      events_;
  double now_ = 0;
  FleetResult result_;
};

FleetResult simulate(const char* name, const FleetOptions& options) {
  const FleetResult result = SimulatedFleet(options).run();
  std::printf(
      "%-24s %d hosts: %ld requests, %.0f in the busiest second, %ld compiles, last host after %.1f s\n",
      name, options.hosts, result.requests, result.most_a_second, result.compiles, result.last / 1000);
  return result;
}

// The figures need all hosts, a quick test fewer.
int hosts_of_this_run() {
  return std::getenv("FLASHJIT_TEST_ALL") ? 10'000 : 200;
}

TEST(FetchPlan, PausesGrowToTheLongest) {
  FetchPlan plan(
      {.patience = milliseconds(200), .first_pause = milliseconds(20), .longest_pause = milliseconds(60)},
      true);
  plan.answer(false);  // the object is absent
  for (const int expected : {20, 30, 45, 60, 60}) {
    ASSERT_EQ(plan.step(), FetchPlan::Step::lease);
    plan.answer(false);  // another has the lease
    ASSERT_EQ(plan.step(), FetchPlan::Step::wait);
    EXPECT_EQ(plan.pause(0), milliseconds(expected / 2));
    EXPECT_EQ(plan.pause(0.5), milliseconds(expected));
    plan.waited(milliseconds(40));
  }
  EXPECT_EQ(plan.step(), FetchPlan::Step::make);
  EXPECT_FALSE(plan.leased());
}

TEST(Fleet, CompilesEachKernelOnce) {
  for (const bool same_order : {true, false}) {
    const FleetOptions options{
        .hosts = hosts_of_this_run(), .start = 6.0 * hosts_of_this_run(), .same_order = same_order};
    const FleetResult with = simulate(same_order ? "leases, one order" : "leases, any order", options);
    EXPECT_EQ(with.compiles, options.kernels);
    // Who begins first compiles 40 kernels one after the other; nobody waits for longer than for that, the
    // last start and, for each kernel, a pause of at most one and a half seconds.
    EXPECT_LT(with.last, options.start + options.kernels * (options.compile + 1'500));
    FleetOptions alone = options;
    alone.leases = false;
    const FleetResult without = simulate(same_order ? "no leases, one order" : "no leases, any order", alone);
    EXPECT_GT(without.compiles, 10 * options.kernels);
    EXPECT_LT(with.compiles, without.compiles);
  }
}

TEST(Fleet, AHostThatDiesCostsOneLease) {
  FleetOptions options{.hosts = hosts_of_this_run(), .start = 6.0 * hosts_of_this_run(), .same_order = false};
  options.deaths = 3;
  const FleetResult result = simulate("leases, three die", options);
  EXPECT_EQ(result.compiles, options.kernels + options.deaths);
}

}  // namespace
}  // namespace flashjit::testing
