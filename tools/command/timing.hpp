// How long a launch takes.
#pragma once

#include <memory>

#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit::command {

enum class Clock {
  wall,       // CPU: steady clock around the launch. CUDA: events around it
  processor,  // CPU only: processor time of the whole process, blind to other processes
};

class LaunchTimer {
 public:
  // `context` is null on a CPU and outlives this.
  LaunchTimer(const cuda::Context* context, Clock clock);
  // Milliseconds of one launch, the mean of so many in a row; waits for their end.
  double operator()(const PreparedLaunch& launch, int times = 1);

 private:
  const Clock clock_;
  std::unique_ptr<cuda::OwnedStream> stream_;
  std::unique_ptr<cuda::Event> start_, stop_;
};

// Of the clock, in milliseconds from some beginning.
double now_ms(Clock clock);

}  // namespace flashjit::command
