// Parameters and memory of the backward on CPUs.
#pragma once

#include "shared/backward_params.h"
#include "shared/layout.h"

namespace flashjit::device {

// Rows in the workspace come in groups. Each batch entry begins with a new group.
constexpr int cpu_backward_group = 32;
// Rows of a head in the workspace, for `rows` rows that belong to `batches` packed sequences.
FLASHJIT_FN constexpr i64 cpu_backward_packed_rows(i64 rows, i64 batches) {
  return (rows / cpu_backward_group + batches) * cpu_backward_group;
}

struct CpuBackwardParams : BackwardParams {
  // Parts into which the blocks of keys of a key/value head are dealt out: part i has blocks i, i + parts,
  // ...
  int parts;
  // Rows of a head in the workspace: those of batch entries in whole groups, packed
  // cpu_backward_packed_rows().
  i64 rows;
  // In the workspace, 64-byte aligned:
  // [num_heads_q, rows] each. A weight is exp2((score - maximum) * scale - offset), where the scale has
  // log2(e) in it. maxima: usually 0, and offsets lse * log2(e). A row whose lse is too far from 0 for that
  // has the maximum of its scores, and the offset is log2 of the sum of exp2((score - maximum) * scale). NaN
  // where lse is NaN. offsets: +inf for a row without weights and after the last row; its maximum is not 0
  // where its scores may not be finite.
  float *offsets, *maxima;
  float* deltas;  // [num_heads_q, rows]
  // dQ without its factor, [parts, num_heads_q, rows / group] times
  //   [group, cpu_backward_row(head_dim)], or
  //   with AMX [cpu_backward_row(head_dim) / 32, 32 columns, group]
  float* sums;
};

// Rows of an item of the first and of the last step.
constexpr int cpu_backward_rows_of_item = 2 * cpu_backward_group;
// Exact sums of an item: the first step clears them after its rows, a last step converts them.
constexpr int cpu_backward_sums_of_item = 512;

// Floats from one packed row to the next. Rows begin at whole vectors, and share no cache sets.
FLASHJIT_FN constexpr int cpu_backward_packed_row(int columns) {
  return cpu_packed_row(round_up(columns, 16));
}

// Floats of a row of dQ in the workspace.
FLASHJIT_FN constexpr int cpu_backward_row(int head_dim) {
  return round_up(head_dim, 32);
}

// Keys that a unit takes at a time: their weights, dS and columns of K share the first-level cache.
constexpr int cpu_backward_keys = 64;
// Bytes of a CPU worker's scratch: K, V, dK and dV of a block; a unit's Q and dO, as they are and transposed;
// its weights, and dS; the offset, maximum, delta and words of its rows; the words of the block's columns.
// keeps_scores: also the scores before formulas.
FLASHJIT_FN constexpr int cpu_backward_scratch(int head_dim, int head_dim_v, int block_n, bool keeps_scores) {
  const int k_row = cpu_backward_packed_row(head_dim), v_row = cpu_backward_packed_row(head_dim_v);
  const int unit = cpu_unit_rows;
  return 4 * (2 * block_n * (k_row + v_row) + unit * (k_row + v_row + head_dim + head_dim_v) +
              (keeps_scores ? 3 : 2) * cpu_backward_keys * unit + 5 * unit + block_n);
}

// With products of bf16: rows of a unit. Sums of dK and dV are loaded and stored once a unit.
constexpr int bf16_backward_unit = 128;
// Bytes of a worker's scratch with them. As float32: dK and dV of a block, scores and dO V^T of 32 x 32
// pairs. As bf16: K twice and V of the block, Q and dO of a unit twice, weights and dS of both, dS of the
// block and 32 rows. Then the words of the unit's rows and of the block's columns.
FLASHJIT_FN constexpr int bf16_backward_scratch(int head_dim, int head_dim_v, int block_n,
                                                bool keeps_scores) {
  const int k_row = round_up(head_dim, 32), v_row = round_up(head_dim_v, 32), unit = bf16_backward_unit;
  return 4 * (block_n * (k_row + v_row) + (keeps_scores ? 3 : 2) * amx_unit * amx_unit) +
         2 * (block_n * (2 * k_row + v_row) + 2 * unit * (k_row + v_row) + 2 * block_n * unit +
              block_n * amx_unit) +
         4 * (2 * unit + block_n);
}

}  // namespace flashjit::device
