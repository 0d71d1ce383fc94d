// The two halves of `flashjit audit` share these: a model of a CPU's caches, and the counters of a GPU.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/command/options.hpp"
#include "tools/command/workload.hpp"

namespace flashjit::command {

struct AuditOptions {
  std::string spec, op, target, device;
  ShapeOptions shape;
  MaskOptions masks;
  std::vector<std::size_t> caches;
  std::string ncu;
  int launches = 0;
  bool json = false;
};

// Bytes of N^2 d^2 / M elements, of the pairs that the masks keep: the order of all exact attention with a
// memory of `capacity` bytes near the processor.
double order_of_bytes(const Workload& work, double capacity);
// Bytes of standard attention, which keeps matrices of all pairs in memory, beside `least` of the tensors.
double bytes_of_standard(const Workload& work, double least);

// Counts on a GPU. With launches: launches for a profiler, which counts.
int audit_on_device(const AuditOptions& options);

}  // namespace flashjit::command
