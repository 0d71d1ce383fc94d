// The race between candidates, with made-up times.
#include "runtime/tune/race.hpp"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

namespace flashjit {
namespace {

// Candidate i has block_m i + 1 and takes times[i], multiplied by the machine's current slowdown.
class FakeClock {
 public:
  FakeClock(std::vector<double> times, double noise, unsigned seed)
      : times_(std::move(times)), noise_(noise), random_(seed) {
    for (std::size_t i = 0; i < times_.size(); ++i)
      candidates.push_back({.config = {.block_m = static_cast<int>(i) + 1}});
  }

  bool run(int samples = std::numeric_limits<int>::max()) {
    int taken = 0;
    return race(candidates, {.sample_ms = [&](const KernelConfig& c) { return ++taken, sample(c); },
                             .go_on = [&] { return taken < samples; }});
  }
  double slowdown = 1;
  std::vector<TuneCandidate> candidates;

 private:
  double sample(const KernelConfig& config) {
    std::lognormal_distribution<double> noise(0, noise_);
    return times_[config.block_m - 1] * noise(random_) * slowdown;
  }
  std::vector<double> times_;
  double noise_;
  std::minstd_rand random_;
};

TEST(Race, TheFastestWinsThroughNoise) {
  for (unsigned seed = 1; seed <= 50; ++seed) {
    FakeClock clock({1.0, 1.3, 0.8, 1.02, 2.5, 0.97}, 0.03, seed);
    ASSERT_TRUE(clock.run());
    EXPECT_EQ(winner(clock.candidates), 2u) << seed;
  }
}

TEST(Race, WhoIsNoFasterThanNoiseDoesNotWin) {
  int replaced = 0;
  for (unsigned seed = 1; seed <= 200; ++seed) {
    FakeClock clock(std::vector<double>(12, 1.0), 0.05, seed);
    ASSERT_TRUE(clock.run());
    replaced += winner(clock.candidates) != 0;
  }
  EXPECT_LE(replaced, 10);              // 2% of 200 races, for each of two rivals
  FakeClock clock({1.0, 0.995}, 0, 1);  // certainly faster, but not by enough
  ASSERT_TRUE(clock.run());
  EXPECT_EQ(winner(clock.candidates), 0u);
}

// The same in every round, so that noise plays no part.
TEST(Race, AWinnerIsFasterByOnePercentAtLeast) {
  const auto winner_of = [](double ms) {
    const std::vector<double> first(race_rounds, 1.0), other(race_rounds, ms);
    return winner(
        {{.config = {.block_m = 1}, .samples_ms = first}, {.config = {.block_m = 2}, .samples_ms = other}});
  };
  EXPECT_EQ(winner_of(0.999), 0u);
  EXPECT_EQ(winner_of(0.991), 0u);
  EXPECT_EQ(winner_of(0.989), 1u);
}

TEST(Race, ThoseWellBehindDropOutEarly) {
  FakeClock clock({1.0, 4.0, 0.8, 1.2, 0.82, 0.84, 0.86}, 0, 1);
  ASSERT_TRUE(clock.run());
  const auto& c = clock.candidates;
  EXPECT_EQ(c[1].samples_ms.size(), std::size_t{least_samples});
  EXPECT_EQ(c[1].verdict, Verdict::dropped);
  EXPECT_EQ(c[1].reason, "400% behind the best after 3 rounds");
  EXPECT_EQ(c[3].samples_ms.size(), std::size_t{least_samples});
  EXPECT_EQ(c[6].samples_ms.size(), std::size_t{screen_rounds});  // near, but fourth
  EXPECT_EQ(c[0].samples_ms.size(), std::size_t{race_rounds});    // the heuristic config always stays
  EXPECT_EQ(c[0].verdict, Verdict::measured);
  EXPECT_EQ(c[2].samples_ms.size(), std::size_t{race_rounds});
  EXPECT_EQ(winner(c), 2u);
}

// Half of the samples take up to ten times as long, as on a machine where other programs run. The fastest
// config is then found, or the default stays and the warning says why; no slower config is ever taken.
TEST(Race, NoiseOfTenfoldMisleadsNobody) {
  int found = 0, dropped = 0, silent = 0;
  constexpr int races = 200;
  for (unsigned seed = 1; seed <= races; ++seed) {
    std::minstd_rand random(seed);
    const double times[] = {1.0, 0.5, 1.6, 1.1};
    std::vector<TuneCandidate> candidates;
    for (int i = 0; i < 4; ++i) candidates.push_back({.config = {.block_m = i + 1}});
    const auto sample = [&](const KernelConfig& c) {
      const double slowdown = random() % 2 ? 1 : 1 + 9 * static_cast<double>(random() % 1000) / 1000;
      return times[c.block_m - 1] * slowdown;
    };
    ASSERT_TRUE(race(candidates, {.sample_ms = sample, .go_on = [] { return true; }}));
    const std::size_t won = winner(candidates);
    EXPECT_TRUE(won == 0 || won == 1) << seed;
    silent += won == 0 && noise_warning(candidates).empty();
    found += won == 1;
    dropped += candidates[1].verdict == Verdict::dropped;
  }
  EXPECT_GT(found, 0);
  EXPECT_LE(silent, races / 50);  // the few samples happened to agree
  // All of its first samples were slow ones, and another's not.
  EXPECT_LE(dropped, races / 5);
}

TEST(Race, WarnsOfNoiseOnly) {
  const auto warning = [](std::vector<double> samples) {
    return noise_warning({{.config = {}, .samples_ms = std::move(samples)}});
  };
  EXPECT_EQ(warning({1.0, 1.1, 0.95, 1.02, 9.0}), "") << "one outlier of five";
  EXPECT_THAT(warning({1.5, 27, 2, 14, 6}), testing::HasSubstr("range from 1.5 to 27 ms"));
  EXPECT_EQ(warning({1, 9}), "") << "too few samples to tell";
}

TEST(Race, EndsWhenNobodyIsAhead) {
  FakeClock clock({1.0, 1.005, 1.05, 0.995}, 0, 1);
  ASSERT_TRUE(clock.run());
  for (const TuneCandidate& c : clock.candidates) EXPECT_LE(c.samples_ms.size(), std::size_t{screen_rounds});
  EXPECT_EQ(winner(clock.candidates), 0u);
}

TEST(Race, SlowdownsOfTheMachineHitAllAlike) {
  FakeClock clock({1.0, 0.9}, 0.01, 7);
  std::minstd_rand random(3);
  int taken = 0;
  ASSERT_TRUE(race(clock.candidates, {.sample_ms =
                                          [&](const KernelConfig& c) {
                                            if (taken++ % 2 == 0) clock.slowdown = 1 + random() % 300 / 100.0;
                                            return (c.block_m == 1 ? 1.0 : 0.9) * clock.slowdown;
                                          },
                                      .go_on = [] { return true; }}));
  EXPECT_EQ(winner(clock.candidates), 1u);
}

// A periodic slowdown, such as a scheduler's turns, would
// always hit the same candidate if the order were fixed.
TEST(Race, WhatReturnsPeriodicallyDecidesNothing) {
  for (int num_candidates = 2; num_candidates <= 6; ++num_candidates) {
    for (int phase = 0; phase < 4; ++phase) {
      std::vector<TuneCandidate> candidates;
      for (int i = 0; i < num_candidates; ++i) candidates.push_back({.config = {.block_m = i + 1}});
      // As many candidates run in the last rounds: the finalists and the first.
      const int period = std::min(num_candidates, 4);
      int taken = phase;
      const auto sample = [&](const KernelConfig&) { return taken++ % period == 0 ? 1.15 : 1.0; };
      ASSERT_TRUE(race(candidates, {.sample_ms = sample, .go_on = [] { return true; }}));
      EXPECT_EQ(winner(candidates), 0u) << num_candidates << " candidates, phase " << phase;
    }
  }
}

TEST(Race, StoppedItKeepsWholeRoundsAndGoesOnFromThere) {
  FakeClock whole({1.0, 0.9, 0.8}, 0, 1), parts({1.0, 0.9, 0.8}, 0, 1);
  ASSERT_TRUE(whole.run());
  std::size_t rounds = 0;
  while (!parts.run(4)) {
    const std::size_t before = rounds;
    rounds = parts.candidates.front().samples_ms.size();
    ASSERT_GT(rounds, before) << "at most three take part: four samples make a round";
    for (const TuneCandidate& c : parts.candidates) {
      EXPECT_TRUE(c.verdict == Verdict::dropped || c.samples_ms.size() == rounds);
    }
    EXPECT_TRUE(rounds >= screen_rounds + 7 || winner(parts.candidates) == 0) << "proved by " << rounds;
  }
  EXPECT_EQ(whole.candidates, parts.candidates);
  EXPECT_EQ(winner(parts.candidates), 2u);
}

TEST(Race, NothingMeasuredLeavesTheHeuristic) {
  FakeClock clock({1.0, 0.5}, 0, 1);
  EXPECT_FALSE(clock.run(0));
  EXPECT_EQ(winner(clock.candidates), 0u);
  EXPECT_TRUE(std::isinf(median_ms(clock.candidates[1])));
}

TEST(Race, UpperBoundOfTheMedian) {
  // All 6 samples are below the median with a chance of 1 in 64, all 7 with a chance of 1 in 128.
  EXPECT_TRUE(std::isinf(upper_bound_of_median({1, 2, 3, 4, 5, 6})));
  EXPECT_EQ(upper_bound_of_median({3, 1, 2, 6, 5, 4, 7}), 7);
  EXPECT_EQ(upper_bound_of_median({11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1}), 10);
}

}  // namespace
}  // namespace flashjit
