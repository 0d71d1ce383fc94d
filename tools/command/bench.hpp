// What `flashjit bench` was asked for.
#pragma once

#include <string>
#include <vector>

#include "tools/command/options.hpp"

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
  bool start = false;  // measure the way to the first result instead
  int threads = 16;    // that ask for a kernel in memory at once
  bool json = false;
};

// bench --compile: cold, warm and hot for each target, rounds interleaved.
int bench_compile(const BenchOptions& options);

// bench --start: what this process takes to its first result, and engine.get from disk and from memory.
int bench_start(const BenchOptions& options);

}  // namespace flashjit::command
