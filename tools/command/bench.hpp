// What `flashjit bench` was asked for.
#pragma once

#include <string>
#include <vector>

#include "runtime/timing.hpp"
#include "tools/command/options.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

struct BenchOptions {
  std::vector<std::string> specs;
  DeviceOptions device;
  ShapeOptions shape;
  MaskOptions masks;
  DropoutOptions dropout;
  std::vector<int> seqlens = {512, 1024, 2048, 4096};
  int tokens = 0;       // 0: shape.batch sequences; otherwise as many as make that many query rows
  std::string configs;  // "": the one that would be taken; "all"; or a list
  int rounds = 10;
  std::uint64_t seed = 1;
  bool processor_time = false;
  bool compile = false;  // measure engine.get instead of kernels
  std::vector<std::string> targets = {"native"};
  bool start = false;                  // measure the way to the first result instead
  int threads = 16;                    // that ask for a kernel in memory at once
  bool serve = false;                  // measure what standard input asks for
  std::string svg;                     // a picture of the rows goes to this file
  std::vector<std::string> baselines;  // files of recorded runs to draw beside this one
  bool json = false;
};

// Launches that one sample is the mean of, so that clocks cost little of it. Two launches are measured.
int launches_of_a_sample(LaunchTimer& time, const PreparedLaunch& launch);

struct Measured {
  Shape shape;
  KernelInfo kernel;
  double ms, spread_percent, tflops;
};

// Sorts the samples, milliseconds of a launch of so many floating-point operations.
Measured measured(const Shape& shape, const Kernel& kernel, std::vector<double>& samples, double flops);
// {spec, batch, ..., config, ms, spread_percent, tflops, registers, ...}
Json to_json(const Measured& measured);

// bench --compile: cold, warm and hot for each target, rounds interleaved.
int bench_compile(const BenchOptions& options);

// bench --start: what this process takes to its first result, and engine.get from disk and from memory.
int bench_start(const BenchOptions& options);

// bench --serve: answers requests, one JSON value a line, until standard input ends.
int bench_serve(const BenchOptions& options);

}  // namespace flashjit::command
