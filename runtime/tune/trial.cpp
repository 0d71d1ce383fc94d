#include "runtime/tune/trial.hpp"

#include <algorithm>
#include <cmath>

namespace flashjit {
namespace {

// The least duration of a sample, so that clocks and launches take little of it.
constexpr double least_ms = 2;
constexpr double most_launches = 1000;
// A sample of cold launches is the median of so many.
constexpr double least_cold = 5, most_cold = 25;

}  // namespace

DeviceTrial::DeviceTrial(Engine& engine, const AttentionSpec& spec, const Shape& shape)
    : engine_(engine),
      spec_(spec),
      shape_(shape),
      tensors_(spec, shape, engine.device()),
      time_(tensors_.context(), Clock::wall) {
  const cuda::Context* const context = tensors_.context();
  if (!context || info_of(spec.op).traffic != Traffic::reads_cache) return;
  read_ = std::make_unique<cuda::PlainRead>(*context);
  cold_ = std::make_unique<cuda::ColdLaunches>(*context, read_.get(), cuda::ColdLaunches::Before::read);
}

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
    candidate.times = static_cast<int>(
        std::clamp(std::ceil(least_ms / ms), cold_ ? least_cold : 1.0, cold_ ? most_cold : most_launches));
  }
  return difference;
}

double DeviceTrial::sample_ms(const KernelConfig& config) {
  const Candidate& candidate = candidates_.at(config);
  if (!cold_) return time_(candidate.launches, candidate.times);
  std::size_t next = 0;
  std::vector<double> samples =
      (*cold_)([&](Stream stream) { candidate.launches[next++ % candidate.launches.size()].launch(stream); },
               candidate.times);
  return median(samples);
}

void DeviceTrial::run(const KernelConfig&, const PreparedLaunch& launch) {
  launch.launch();
}

}  // namespace flashjit
