// The kernels of a backward on GPUs: what families and launches both go by.
#pragma once

#include "codegen/base/target.hpp"
#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

struct CudaBackwardKernels {
  bool by_wgmma;  // else by mma.sync
  // Blocks of the grid make one of dK, dV and dQ, each by products of its own: no thread holds two of them.
  bool wide = false;
  // Blocks of the grid make either dK and dQ, or dV; of wide heads either dK or dV.
  bool divides_sums = false;
  // The grid fills the multiprocessors once. Its blocks take one work tile after the other and write dQ.
  bool persistent = false;
  int resident_blocks = 1;  // of a persistent grid, on a multiprocessor
  // The first step makes bits of the rows that see a block of keys: masks whose keys keep no interval.
  bool has_row_bits = false;
  // A deterministic kernel leaves dQ to a kernel of its own, or else adds dQ in a fixed order. That of wide
  // heads always leaves it.
  bool separate_dq = false;
  // The last step is flashjit_backward_finish: it writes dQ from sums, or gradients of sink logits.
  bool finishes = true;
  // Gradients of tables are summed up exactly, in the workspace, and a last step reads the sums.
  bool has_exact_sums = false;

  // The spec is deterministic.
  bool deterministic = false;
  bool orders_dq() const { return deterministic && !separate_dq; }

  CudaBackwardKernels(const AttentionSpec& spec, const KernelConfig& config, bool wgmma);
  CudaBackwardKernels(const AttentionSpec& spec, const KernelConfig& config, const Target& target)
      : CudaBackwardKernels(spec, config, target.has(Instructions::wgmma)) {}
};

// Adds the last step: it writes dQ from its sums, or tables from theirs.
void add_last_step(const AttentionSpec& spec, const ParamsType& params, KernelSource& source);

}  // namespace flashjit
