// The options of `flashjit bench`, and the parts that its modes share.
#pragma once

#include <string>
#include <vector>

#include "runtime/timing.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

struct BenchOptions {
  std::vector<std::string> specs;
  std::string op;  // instead of the specs' own; empty: their own
  DeviceOptions device;
  ShapeOptions shape;
  MaskOptions masks;
  DropoutOptions dropout;
  std::vector<int> seqlens;  // empty: usual ones
  int tokens = 0;            // query rows in all, from which the batch follows; 0: shape.batch sequences
  std::string configs;       // "all", or a list; "": the config that an engine would take
  int rounds = 10;
  std::uint64_t seed = 1;
  bool heads_first = false;  // layout of a decode's K and V
  bool processor_time = false;
  bool compile = false;  // measure engine.get instead of kernels
  std::vector<std::string> targets = {"native"};
  bool start = false;           // measure the way to the first result instead
  int threads = 16;             // threads that ask at once for a kernel in memory
  int gpus = 0;                 // measure so many together
  std::string layout = "best";  // of the sequence among them
  bool serve = false;           // measure what standard input asks for
  bool json = false;
};

// How many launches one sample averages, so that reading the clock costs little. Measures two launches.
int launches_of_a_sample(LaunchTimer& time, const PreparedLaunch& launch);

struct Measured {
  Shape shape;
  KernelInfo kernel;
  double ms, spread_percent, tflops;
  double gb_per_s;  // of the traffic that bounds the operation; 0 if arithmetic does
};

// Sorts the samples (milliseconds of a launch). `flops` are the floating-point operations of a launch,
// `bytes` those of Workload::bound_bytes().
Measured measured(const Shape& shape, const Kernel& kernel, std::vector<double>& samples, double flops,
                  double bytes);
// {spec, batch, ..., config, ms, spread_percent, tflops, registers, ...}
Json to_json(const Measured& measured);

// bench --compile: cold, warm and hot for each target, rounds interleaved.
int bench_compile(const BenchOptions& options);

// bench --start: the time from the start of this process to its first result, and of engine.get from disk and
// from memory.
int bench_start(const BenchOptions& options);

// bench --gpus: a sequence over several GPUs of this host, beside one of them alone.
int bench_gpus(const BenchOptions& options);

// bench --serve: answers requests, one JSON value a line, until standard input ends.
int bench_serve(const BenchOptions& options);

}  // namespace flashjit::command
