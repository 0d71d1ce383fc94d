// Measures launches, and the statistics of samples; for the tuner and the command.
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
  // `context` is null on a CPU and must outlive the timer.
  LaunchTimer(const cuda::Context* context, Clock clock);
  // Milliseconds of one launch: the mean of `times` launches in a
  // row, which take the given ones in turn. Waits for their end.
  double operator()(std::span<const PreparedLaunch> launches, int times);
  double operator()(const PreparedLaunch& launch, int times = 1) {
    return (*this)(std::span(&launch, 1), times);
  }

 private:
  const Clock clock_;
  std::unique_ptr<cuda::OwnedStream> stream_;
  std::unique_ptr<cuda::Event> start_, stop_;
};

// The clock's time in milliseconds from some beginning.
double now_ms(Clock clock);

// The median; sorts the samples in place.
double median(std::vector<double>& samples);
// Half the distance between the quartiles of sorted samples, in per cent of the median.
double spread_percent(const std::vector<double>& sorted);

}  // namespace flashjit
