// Which of two kernels a backward on a GPU is.
#pragma once

#include "codegen/config.hpp"

namespace flashjit {

// Whether the config is one of the wgmma kernel, by its warps: two warpgroups that compute, and one that
// copies. A block of the kernel by mma.sync has 4 or 8 warps.
inline bool backward_by_wgmma(const KernelConfig& config) {
  return config.num_warps > 8;
}

}  // namespace flashjit
