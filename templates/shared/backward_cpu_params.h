// Parameters and memory of the backward on CPUs.
#pragma once

#include "shared/backward_params.h"
#include "shared/layout.h"

namespace flashjit::device {

struct CpuBackwardParams : BackwardParams {
  // Parts into which the blocks of keys of a key/value head are dealt out: part i has blocks i, i + parts,
  // ...
  int parts;
  int rows;  // of a head in the workspace: batch * seqlen_q, packed the rows of all sequences
  // In the workspace, 64-byte aligned:
  float* stats;  // [num_heads_q, rows, 2]: lse * log2(e), +inf for a row without keys; delta
  float* sums;   // dQ without its factor, [parts, num_heads_q, rows, cpu_backward_row(head_dim)]
};

// Rows of an item of the first and of the last step.
constexpr int cpu_backward_rows_of_item = 64;

// Floats from one packed row to the next. Rows begin at whole vectors, and share no cache sets.
FLASHJIT_FN constexpr int cpu_backward_packed_row(int columns) {
  return cpu_packed_row(round_up(columns, 16));
}

// Floats of a row of dQ in the workspace.
FLASHJIT_FN constexpr int cpu_backward_row(int head_dim) {
  return round_up(head_dim, 16);
}

// Bytes of a CPU worker's scratch: K, V, dK and dV of a block; a unit's Q and dO, as they are and transposed;
// its dQ; its weights, and dS; the lse, delta and words of its rows; the words of the block's columns.
FLASHJIT_FN constexpr int cpu_backward_scratch(int head_dim, int head_dim_v, int block_n) {
  const int k_row = cpu_backward_packed_row(head_dim), v_row = cpu_backward_packed_row(head_dim_v);
  const int unit = cpu_unit_rows;
  return 4 * (2 * block_n * (k_row + v_row) + unit * (2 * k_row + v_row + head_dim + head_dim_v) +
              2 * block_n * unit + 4 * unit + block_n);
}

}  // namespace flashjit::device
