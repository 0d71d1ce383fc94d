#include "runtime/timing.hpp"

#include <time.h>
#include <algorithm>
#include <cmath>

namespace flashjit {
namespace {

// Linear interpolation between closest ranks.
double quantile(const std::vector<double>& sorted, double q) {
  const double position = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

}  // namespace

double now_ms(Clock clock) {
  timespec t{};
  clock_gettime(clock == Clock::wall ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

LaunchTimer::LaunchTimer(const cuda::Context* context, Clock clock) : clock_(clock) {
  if (!context) return;
  stream_ = std::make_unique<cuda::OwnedStream>(*context);
  start_ = std::make_unique<cuda::Event>(*context);
  stop_ = std::make_unique<cuda::Event>(*context);
}

double LaunchTimer::operator()(std::span<const PreparedLaunch> launches, int times) {
  const Stream stream = stream_ ? stream_->get() : nullptr;
  const double start = now_ms(clock_);
  if (stream_) start_->record(stream);
  for (int i = 0; i < times; ++i) launches[static_cast<std::size_t>(i) % launches.size()].launch(stream);
  if (!stream_) return (now_ms(clock_) - start) / times;
  stop_->record(stream);
  stop_->synchronize();
  return elapsed_ms(*start_, *stop_) / times;
}

double median(std::vector<double>& samples) {
  std::sort(samples.begin(), samples.end());
  return quantile(samples, 0.5);
}

double spread_percent(const std::vector<double>& sorted) {
  return 50 * (quantile(sorted, 0.75) - quantile(sorted, 0.25)) / quantile(sorted, 0.5);
}

}  // namespace flashjit
