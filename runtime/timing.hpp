// How long a launch takes, and what many samples of that say. For the tuner and the command.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

enum class Clock {
  wall,       // CPU: steady clock around the launch. CUDA: events around it
  processor,  // CPU only: processor time of the whole process, blind to other processes
};

class LaunchTimer {
 public:
  // `context` is null on a CPU and outlives this.
  LaunchTimer(const cuda::Context* context, Clock clock);
  // Milliseconds of one launch, the mean of so many in a row, in turn of those given; waits for their end.
  double operator()(std::span<const PreparedLaunch> launches, int times);
  double operator()(const PreparedLaunch& launch, int times = 1) {
    return (*this)(std::span(&launch, 1), times);
  }

 private:
  const Clock clock_;
  std::unique_ptr<cuda::OwnedStream> stream_;
  std::unique_ptr<cuda::Event> start_, stop_;
};

// Of the clock, in milliseconds from some beginning.
double now_ms(Clock clock);

// Sorted in place.
double median(std::vector<double>& samples);
// Half the distance between the quartiles, in per cent of the median. Of sorted samples.
double spread_percent(const std::vector<double>& sorted);

}  // namespace flashjit
