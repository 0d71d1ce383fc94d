#include "runtime/tune/race.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>

#include "runtime/timing.hpp"

namespace flashjit {
namespace {

constexpr double least_gain = 0.01;
constexpr std::size_t finalists = 3;
// How far behind the best a candidate may be after `least_samples` and more rounds.
constexpr double tolerances[screen_rounds - least_samples + 1] = {1.25, 1.15, 1.1};
// Half the distance between the quartiles of how much longer than the fastest samples take, in per cent of
// the median. On an idle machine it is a few.
constexpr double noisy_percent = 25;

std::size_t rounds_of(const TuneCandidate& candidate) {
  return candidate.samples_ms.size();
}

bool is_in(const TuneCandidate& candidate) {
  return candidate.verdict == Verdict::measured;
}

void drop(TuneCandidate& candidate, double best) {
  candidate.verdict = Verdict::dropped;
  const int percent = static_cast<int>(std::lround(100 * (fastest_ms(candidate) / best - 1)));
  candidate.reason =
      std::to_string(percent) + "% behind the best after " + std::to_string(rounds_of(candidate)) + " rounds";
}

// Drops slow candidates after so many rounds of screening.
void drop_slow(std::vector<TuneCandidate>& candidates, std::size_t rounds) {
  if (rounds < least_samples) return;
  std::vector<double> times;
  for (const TuneCandidate& c : candidates) {
    if (is_in(c)) times.push_back(fastest_ms(c));
  }
  std::sort(times.begin(), times.end());
  const double best = times.front();
  double limit = best * tolerances[rounds - least_samples];
  if (rounds == screen_rounds && times.size() > finalists) limit = std::min(limit, times[finalists - 1]);
  for (TuneCandidate& c : candidates) {
    if (&c != &candidates.front() && is_in(c) && fastest_ms(c) > limit) drop(c, best);
  }
}

// The order of the candidates in a round. It differs between rounds, so that a
// periodic disturbance, such as a scheduler's turns, does not always hit the
// same candidate. A resumed race has the same orders as an uninterrupted one.
std::vector<TuneCandidate*> order_of_round(std::vector<TuneCandidate>& candidates, std::size_t round) {
  std::vector<TuneCandidate*> order;
  for (TuneCandidate& c : candidates) {
    if (is_in(c)) order.push_back(&c);
  }
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(round)));
  return order;
}

// Whether no candidate is ahead of the first by enough to win.
bool is_decided(const std::vector<TuneCandidate>& candidates) {
  const TuneCandidate& first = candidates.front();
  constexpr double enough = 1 - least_gain;
  return std::none_of(candidates.begin() + 1, candidates.end(), [&](const TuneCandidate& c) {
    return is_in(c) &&
           (median_ms(c) <= enough * median_ms(first) || fastest_ms(c) <= enough * fastest_ms(first));
  });
}

}  // namespace

double median_ms(const TuneCandidate& candidate) {
  std::vector<double> samples = candidate.samples_ms;
  return samples.empty() ? std::numeric_limits<double>::infinity() : median(samples);
}

double fastest_ms(const TuneCandidate& candidate) {
  const std::vector<double>& samples = candidate.samples_ms;
  return samples.empty() ? std::numeric_limits<double>::infinity()
                         : *std::min_element(samples.begin(), samples.end());
}

std::string noise_warning(const std::vector<TuneCandidate>& candidates) {
  // How much longer than its config's fastest each sample took.
  std::vector<double> slowdowns;
  const TuneCandidate* widest = nullptr;
  double widest_range = 0;
  for (const TuneCandidate& c : candidates) {
    if (rounds_of(c) < least_samples) continue;
    for (const double ms : c.samples_ms) slowdowns.push_back(ms / fastest_ms(c));
    const double range = *std::max_element(c.samples_ms.begin(), c.samples_ms.end()) / fastest_ms(c);
    if (range > widest_range) widest = &c, widest_range = range;
  }
  std::sort(slowdowns.begin(), slowdowns.end());
  if (!widest || spread_percent(slowdowns) < noisy_percent) return {};
  char text[160];
  std::snprintf(
      text, sizeof text,
      "the machine is too noisy to choose well: %zu samples of one config range from %.3g to %.3g ms; "
      "tune again (--again) when nothing else runs",
      rounds_of(*widest), fastest_ms(*widest), widest_range * fastest_ms(*widest));
  return text;
}

double upper_bound_of_median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  // The k-th smallest of n samples is below the median only if at
  // least k samples fall below it: the upper tail of Binomial(n, 1/2).
  const std::size_t n = samples.size();
  double tail = 0, term = std::pow(0.5, static_cast<double>(n));  // C(n, k) / 2^n, for k = n downwards
  double bound = std::numeric_limits<double>::infinity();
  for (std::size_t k = n; k >= 1; --k) {
    tail += term;
    if (tail > 0.01) break;
    bound = samples[k - 1];
    term *= static_cast<double>(k) / static_cast<double>(n - k + 1);
  }
  return bound;
}

bool race(std::vector<TuneCandidate>& candidates, const RaceHooks& hooks) {
  TuneCandidate& first = candidates.front();
  for (std::size_t round = rounds_of(first); round < race_rounds; ++round) {
    if (round == screen_rounds && is_decided(candidates)) return true;
    for (TuneCandidate* candidate : order_of_round(candidates, round)) {
      if (!hooks.go_on()) {
        for (TuneCandidate& c : candidates) c.samples_ms.resize(std::min(rounds_of(c), round));
        return false;
      }
      candidate->samples_ms.push_back(hooks.sample_ms(candidate->config));
    }
    if (round < screen_rounds) drop_slow(candidates, round + 1);
  }
  return true;
}

std::size_t winner(const std::vector<TuneCandidate>& candidates) {
  const TuneCandidate& first = candidates.front();
  std::size_t best = 0;
  double best_ratio = 1 - least_gain;
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    const TuneCandidate& candidate = candidates[i];
    if (!is_in(candidate)) continue;
    // Only the rounds after the screening count: the screening chose
    // candidates for their speed, so its rounds would flatter them.
    std::vector<double> ratios;
    for (std::size_t r = screen_rounds; r < std::min(rounds_of(candidate), rounds_of(first)); ++r) {
      ratios.push_back(candidate.samples_ms[r] / first.samples_ms[r]);
    }
    if (ratios.empty() || upper_bound_of_median(ratios) >= 1) continue;
    const double ratio = median(ratios);
    if (ratio > best_ratio) continue;
    best = i;
    best_ratio = ratio;
  }
  return best;
}

}  // namespace flashjit
