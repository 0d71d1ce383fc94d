#include "tools/command/timing.hpp"

#include <time.h>

namespace flashjit::command {

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

double LaunchTimer::operator()(const PreparedLaunch& launch, int times) {
  if (!stream_) {
    const double start = now_ms(clock_);
    for (int i = 0; i < times; ++i) launch.launch();
    return (now_ms(clock_) - start) / times;
  }
  start_->record(stream_->get());
  for (int i = 0; i < times; ++i) launch.launch(stream_->get());
  stop_->record(stream_->get());
  stop_->synchronize();
  return elapsed_ms(*start_, *stop_) / times;
}

}  // namespace flashjit::command
