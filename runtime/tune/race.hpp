// The race that finds the fastest of several candidates. In each round every remaining candidate takes one
// sample, in an order that changes, so that anything that slows the device down slows all of them. In the
// first rounds, candidates well behind drop out, once they have a few samples: other programs only slow a
// sample down, so that the fastest samples are compared. The last few then run against the heuristic config
// in fresh rounds; one of them wins only if those rounds alone show that it is faster beyond noise. (Racing:
// Maron and Moore, "Hoeffding races", 1993; interleaving and robust statistics as in Highway's auto_tune.h.)
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cache/tune_record.hpp"

namespace flashjit {

// No candidate drops out with fewer samples than `least_samples`.
inline constexpr int screen_rounds = 5, confirm_rounds = 11, least_samples = 3;
inline constexpr int race_rounds = screen_rounds + confirm_rounds;

// `go_on` is asked before every sample; false ends the race there.
struct RaceHooks {
  std::function<double(const KernelConfig&)> sample_ms;
  std::function<bool()> go_on;
};

// Runs the race. candidates.front() is the heuristic config and never drops out. Candidates that have samples
// continue from there. Returns true if the race was run to its end; otherwise only whole rounds are kept.
bool race(std::vector<TuneCandidate>& candidates, const RaceHooks& hooks);

// The index of the candidate to use: the fastest of those shown
// to be at least 1% faster than the first, else the first.
std::size_t winner(const std::vector<TuneCandidate>& candidates);

// An upper bound of the median of the samples' distribution. It is exceeded in at most 1% of cases, whatever
// the distribution (from the ranks of a binomial distribution). Infinite if there are too few samples.
double upper_bound_of_median(std::vector<double> samples);

double median_ms(const TuneCandidate& candidate);
double fastest_ms(const TuneCandidate& candidate);

// A warning that samples differ so much that they decide little, with the range of the heuristic config's;
// empty if they agree.
std::string noise_warning(const std::vector<TuneCandidate>& candidates);

}  // namespace flashjit
