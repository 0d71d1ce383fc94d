// Machine code loaded on a device: what a Kernel drives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codegen/error.hpp"
#include "codegen/kernel_source.hpp"
#include "runtime/flashjit.hpp"
#include "templates/shared/params.h"

namespace flashjit {

// All that one launch hands to the machine code, as often as wanted.
// Blocks of a launch.
struct Grid {
  unsigned x, y = 1;
};

struct Launch {
  device::ForwardParams params;
  device::ForwardMaps maps;  // sm_90a only, otherwise unset
  Grid grid;                 // cuda
};

// Thread-safe. A launch allocates nothing, once the threads of a CPU have its scratch.
class Executable {
 public:
  virtual ~Executable() = default;
  // Parameters are checked already, and there is at least one query row.
  virtual void encode(const device::ForwardParams& params, Launch& launch) const = 0;
  virtual void launch(const Launch& launch, Stream stream) const = 0;

  void launch(const device::ForwardParams& params, Stream stream) const {
    Launch encoded;
    encode(params, encoded);
    launch(encoded, stream);
  }
};

// Code that cannot be loaded whatever else is tried: damaged, or of another kind of machine. Every other
// failure to load (no memory, no context, pages that may not be executable) says nothing against the code.
class BadCode : public Error {
 public:
  using Error::Error;
};

// `code` is what a Compiler made of a source with these steps; of `info` the spec, target and config count.
// Throw device_failed or target_unavailable, as BadCode where the code is to blame.
std::unique_ptr<Executable> load_cuda(int device_index, const KernelInfo& info, const std::string& code,
                                      const std::vector<Step>& steps);

// num_threads: those of parallel_for that work is cut for.
std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps,
                                     const KernelInfo& info);

}  // namespace flashjit
