// One spec at one shape on a device: where candidates are built, checked and timed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"
#include "runtime/timing.hpp"
#include "runtime/tune/tensors.hpp"

namespace flashjit {

class Trial {
 public:
  virtual ~Trial() = default;
  // Compiles and loads it. Thread-safe.
  virtual void build(const KernelConfig& config) = 0;
  // Runs it on poisoned outputs. How they differ from those of the first config that was checked; empty if no
  // more than rounding explains. After build().
  virtual std::string check(const KernelConfig& config) = 0;
  // Milliseconds of one launch. After check().
  virtual double sample_ms(const KernelConfig& config) = 0;
};

class DeviceTrial : public Trial {
 public:
  // `engine` outlives this, and keeps every kernel that was built.
  DeviceTrial(Engine& engine, const AttentionSpec& spec, const Shape& shape);

  void build(const KernelConfig& config) override;
  std::string check(const KernelConfig& config) override;
  double sample_ms(const KernelConfig& config) override;

 protected:
  // A launch on the first set of tensors; tests break its results.
  virtual void run(const KernelConfig& config, const PreparedLaunch& launch);
  const AttentionArgs& first_set() const { return tensors_.sets().front(); }

 private:
  struct Candidate {
    const Kernel* kernel = nullptr;
    std::vector<PreparedLaunch> launches;  // one for each set
    int times = 1;                         // launches of one sample
  };

  Engine& engine_;
  const AttentionSpec spec_;
  const Shape shape_;
  TuneTensors tensors_;
  LaunchTimer time_;
  std::vector<TuneTensors::Output> expected_;
  std::mutex mutex_;  // of the map; its elements are used by one thread at a time
  std::map<KernelConfig, Candidate> candidates_;
};

using TrialFactory =
    std::function<std::unique_ptr<Trial>(Engine& engine, const AttentionSpec& spec, const Shape& shape)>;

// tune() with trials of the caller's making.
std::vector<TuneResult> tune_with(const TrialFactory& make_trial, const AttentionSpec& spec,
                                  const std::vector<Shape>& shapes, const TuneOptions& options,
                                  const TuneCallback& progress);

}  // namespace flashjit
