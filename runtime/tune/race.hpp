// Which of several candidates is the fastest: rounds in which each that is still in takes one sample, in an
// order that changes, so that whatever slows the device down slows them all. In the first rounds those well
// behind drop out; a last few then run against the heuristic config in fresh rounds, and one of them wins
// only if those alone show it to be faster beyond noise. (Racing: Maron and Moore, "Hoeffding races", 1993;
// interleaving and robust statistics as in Highway's auto_tune.h.)
#pragma once

#include <functional>
#include <vector>

#include "cache/tune_record.hpp"

namespace flashjit {

inline constexpr int screen_rounds = 5, confirm_rounds = 11;
inline constexpr int race_rounds = screen_rounds + confirm_rounds;

// Asked before every sample and after every round; false ends the race there.
struct RaceHooks {
  std::function<double(const KernelConfig&)> sample_ms;
  std::function<bool()> go_on;
};

// candidates.front() is the heuristic config and never drops out. Candidates that have samples go on from
// there. True when the race was run to its end; otherwise only whole rounds are kept.
bool race(std::vector<TuneCandidate>& candidates, const RaceHooks& hooks);

// The one to use, by its position: the fastest of those shown to be at least 1% faster than the first, else
// the first.
std::size_t winner(const std::vector<TuneCandidate>& candidates);

// A value that the median of what `samples` were drawn from exceeds in at most 1% of cases, whatever their
// distribution (from the ranks of a binomial distribution); infinite where they are too few.
double upper_bound_of_median(std::vector<double> samples);

double median_ms(const TuneCandidate& candidate);

}  // namespace flashjit
