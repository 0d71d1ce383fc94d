// A trial builds, checks and times candidates for one spec at one shape on a device.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/cuda/cold_launches.hpp"
#include "runtime/flashjit.hpp"
#include "runtime/timing.hpp"
#include "runtime/tune/tensors.hpp"

namespace flashjit {

class Trial {
 public:
  virtual ~Trial() = default;
  // Compiles and loads the config's kernel. Thread-safe.
  virtual void build(const KernelConfig& config) = 0;
  // Runs the config's kernel on poisoned outputs, after build(). Returns how the outputs differ
  // from those of the first config that was checked; empty if rounding explains the difference.
  virtual std::string check(const KernelConfig& config) = 0;
  // Milliseconds of one launch, after check().
  virtual double sample_ms(const KernelConfig& config) = 0;
};

class DeviceTrial : public Trial {
 public:
  // `engine` must outlive the trial; it keeps every kernel that was built.
  DeviceTrial(Engine& engine, const AttentionSpec& spec, const Shape& shape);

  void build(const KernelConfig& config) override;
  std::string check(const KernelConfig& config) override;
  double sample_ms(const KernelConfig& config) override;

 protected:
  // Launches on the first set of tensors; tests override it to break results.
  virtual void run(const KernelConfig& config, const PreparedLaunch& launch);
  const AttentionArgs& first_set() const { return tensors_.sets().front(); }

 private:
  struct Candidate {
    const Kernel* kernel = nullptr;
    std::vector<PreparedLaunch> launches;  // one for each set of tensors
    int times = 1;                         // launches of one sample
  };

  Engine& engine_;
  const AttentionSpec spec_;
  const Shape shape_;
  TuneTensors tensors_;
  LaunchTimer time_;
  // On a GPU for decode, which memory bounds: 256 MB are read before every launch.
  std::unique_ptr<cuda::PlainRead> read_;
  std::unique_ptr<cuda::ColdLaunches> cold_;
  std::vector<TuneTensors::Output> expected_;
  std::mutex mutex_;  // guards the map; each element is used by one thread at a time
  std::map<KernelConfig, Candidate> candidates_;
};

using TrialFactory =
    std::function<std::unique_ptr<Trial>(Engine& engine, const AttentionSpec& spec, const Shape& shape)>;

// tune() with trials that the caller makes.
std::vector<TuneResult> tune_with(const TrialFactory& make_trial, const AttentionSpec& spec,
                                  const std::vector<Shape>& shapes, const TuneOptions& options,
                                  const TuneCallback& progress);

}  // namespace flashjit
