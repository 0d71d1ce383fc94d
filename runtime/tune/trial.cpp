#include "runtime/tune/trial.hpp"

#include <algorithm>
#include <cmath>

namespace flashjit {
namespace {

// The least duration of a sample, so that clocks and launches take little of it.
constexpr double least_ms = 2;
constexpr double most_launches = 1000;

}  // namespace

DeviceTrial::DeviceTrial(Engine& engine, const AttentionSpec& spec, const Shape& shape)
    : engine_(engine),
      spec_(spec),
      shape_(shape),
      tensors_(spec, shape, engine.device()),
      time_(tensors_.context(), Clock::wall) {}

void DeviceTrial::build(const KernelConfig& config) {
  AttentionSpec pinned_spec = spec_;
  pinned_spec.config = pinned(config);
  const Kernel& kernel = engine_.get(pinned_spec, shape_);
  const std::lock_guard lock(mutex_);
  candidates_[config].kernel = &kernel;
}

std::string DeviceTrial::check(const KernelConfig& config) {
  Candidate& candidate = candidates_.at(config);
  candidate.launches.clear();
  for (const AttentionArgs& args : tensors_.sets()) {
    candidate.launches.push_back(
        candidate.kernel->prepare(tensors_.with_workspace(args, candidate.kernel->workspace_bytes(shape_))));
  }
  tensors_.poison();
  run(config, candidate.launches.front());
  const std::vector<TuneTensors::Output> outputs = tensors_.fetch();
  // The first outputs are compared with themselves: NaN never passes.
  if (expected_.empty()) expected_ = outputs;
  std::string difference = output_difference(spec_, outputs, expected_);
  if (difference.empty()) {
    const double once = time_(candidate.launches, 1), again = time_(candidate.launches, 1);
    const double ms = std::max(std::min(once, again), 1e-6);
    candidate.times = static_cast<int>(std::clamp(std::ceil(least_ms / ms), 1.0, most_launches));
  }
  return difference;
}

double DeviceTrial::sample_ms(const KernelConfig& config) {
  const Candidate& candidate = candidates_.at(config);
  return time_(candidate.launches, candidate.times);
}

void DeviceTrial::run(const KernelConfig&, const PreparedLaunch& launch) {
  launch.launch();
}

}  // namespace flashjit
