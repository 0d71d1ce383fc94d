// Which of two kernels a backward on a GPU is, and what both share.
#pragma once

#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// Whether the config is one of the wgmma kernel, by its warps: two warpgroups that compute, and one that
// copies. A block of the kernel by mma.sync has 4 or 8 warps.
inline bool backward_by_wgmma(const KernelConfig& config) {
  return config.num_warps > 8;
}

// Whether a GPU's backward sums up gradients of tables exactly, in the workspace, and has a step that reads
// them.
bool has_exact_sums(const AttentionSpec& spec);
// Adds a GPU's last step: it writes dQ from its sums, or tables from theirs.
void add_last_step(const AttentionSpec& spec, KernelSource& source);

}  // namespace flashjit
