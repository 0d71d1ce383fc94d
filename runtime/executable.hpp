// Machine code loaded on a device: what a Kernel drives.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "codegen/kernel_source.hpp"
#include "runtime/flashjit.hpp"
#include "templates/shared/params.h"

namespace flashjit {

class Executable {
 public:
  virtual ~Executable() = default;
  // Parameters are checked already, and there is at least one query row. Thread-safe, allocates nothing.
  virtual void launch(const device::ForwardParams& params, Stream stream) const = 0;
};

// `code` is what a Compiler made of a source with these steps and config. Throw device_failed or
// target_unavailable.
std::unique_ptr<Executable> load_cuda(int device_index, const std::string& code,
                                      const std::vector<Step>& steps, const KernelConfig& config);

std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, const std::string& code,
                                     const std::vector<Step>& steps, const KernelConfig& config);

}  // namespace flashjit
