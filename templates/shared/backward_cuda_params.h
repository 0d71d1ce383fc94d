// A backward's parameters on GPUs.
#pragma once

#include "shared/backward_params.h"

namespace flashjit::device {

// Rows of the workspace that a sequence takes are rounded up to this: no tile of up to so many rows has rows
// of two sequences.
constexpr int backward_row_unit = 128;

// Threads and rows of a block of the first and the last step.
constexpr int backward_threads = 256, backward_rows_of_block = 32;
// Such blocks that a multiprocessor has at once on sm_90a. Without a number ptxas squeezes some of the steps
// into so few registers that they spill. With some masks the first step needs more, to find far rows again.
constexpr int backward_blocks = 4, backward_first_blocks = 3;
// Shared memory of the step that adds up gradients of sink logits. Elements of a table that a block of a
// deterministic backward's last step writes.
constexpr int backward_sinks_shared = backward_threads / 32 * 4,
              backward_elements_of_block = 4 * backward_threads;

// The warps that share the same keys. Up to 64 columns a warp has 32 keys to itself. With wider heads a
// thread has no registers for their dK and dV, so two warps share 32 keys, and four share 16 keys of more
// than 256 columns: each makes the scores of its part of the query rows, and dK and dV of its part of the
// columns.
FLASHJIT_FN constexpr int backward_column_parts(int head_dim, int head_dim_v) {
  const int widest = max(head_dim, head_dim_v);
  return widest > 256 ? 4 : widest > 64 ? 2 : 1;
}

// The tile of the mma.sync kernel for dQ alone. It always has two buffers.
FLASHJIT_FN constexpr int backward_dq_rows(int num_warps) {
  return num_warps * 16;
}
// Q, dO and two buffers of K and V of the widest heads fit 99 KB, the least that a GPU from sm_80 up has.
FLASHJIT_FN constexpr int backward_dq_keys(int head_dim, int head_dim_v) {
  return round_up(head_dim, 16) + round_up(head_dim_v, 16) > 384 ? 16 : 32;
}

// Blocks of 64 rows that dq_blocks_added counts, for each of two consumers, of so many rows.
FLASHJIT_FN constexpr i64 backward_ordered_blocks(i64 rows) {
  return rows / 64 * 2;
}

// Floats of a row of dQ's sums.
FLASHJIT_FN constexpr int cuda_backward_row(int head_dim) {
  return round_up(head_dim, 16);
}

// Shared memory of the mma.sync kernel for dK, dV and dQ: offsets in bytes. K and V of block_n keys;
// num_stages times Q, dO and the numbers of block_m rows; two of dS^T, or one of dS^T and one of P^T. Rows
// are padded to a multiple of 16 elements.
struct CudaBackwardLayout {
  int k, v, q, d_o, lse, delta, row_words, stage_bytes, ds, end;

  FLASHJIT_FN constexpr CudaBackwardLayout(int head_dim, int head_dim_v, int block_m, int block_n,
                                           int num_stages, bool dropout, bool deterministic)
      : k(0),
        v(2 * block_n * round_up(head_dim, 16)),
        q(v + 2 * block_n * round_up(head_dim_v, 16)),
        d_o(q + 2 * block_m * round_up(head_dim, 16)),
        lse(d_o + 2 * block_m * round_up(head_dim_v, 16)),
        delta(lse + 4 * block_m),
        row_words(delta + 4 * block_m),
        stage_bytes(row_words + (dropout ? 8 * block_m : 0) - q),
        ds(q + num_stages * stage_bytes),
        end(ds + (deterministic && backward_column_parts(head_dim, head_dim_v) == 1
                      ? 0
                      : 2 * 2 * block_n * block_m)) {}
};

// The same of the mma.sync kernel for dQ alone: Q and dO of block_m rows; num_stages times K, V and dropout's
// words of block_n keys. A SharedTile begins at a multiple of 128 bytes.
struct CudaBackwardDqLayout {
  int q, d_o, k, v, column_words, stage_bytes, end;

  FLASHJIT_FN constexpr CudaBackwardDqLayout(int head_dim, int head_dim_v, int block_m, int block_n,
                                             int num_stages, bool dropout)
      : q(0),
        d_o(2 * block_m * round_up(head_dim, 16)),
        k(d_o + 2 * block_m * round_up(head_dim_v, 16)),
        v(k + 2 * block_n * round_up(head_dim, 16)),
        column_words(v + 2 * block_n * round_up(head_dim_v, 16)),
        stage_bytes(column_words + (dropout ? round_up(4 * block_n, 128) : 0) - k),
        end(k + num_stages * stage_bytes) {}
};

struct CudaBackwardParams : BackwardParams {
  // In the workspace, [num_heads_q, rows]. A sequence's rows begin at first_row().
  // lse * log2(e); +inf for rows without keys, with do and dlse of 0, and outside a sequence: their weights
  // are 0
  float* lse_log2;
  float* delta;  // rowsum(do * o) - dlse; 0 where lse_log2 is +inf
  // Of a row whose lse is far from 0 (cuda/backward_far_rows.cuh) its largest score, which kernels subtract
  // before they scale; lse_log2 is that of the differences. +inf: the row's scores may be anything, and its
  // weights are 0. 0 for all others: a tile of such rows alone subtracts nothing.
  float* far_max;
  unsigned char* far_marks;  // a byte for every four rows: not 0 if one of them has a far_max
  // [num_heads_q, rows, cuda_backward_row(head_dim)]: dQ / scale, tiles of 16 rows x 8 columns in the order
  // of the kernels' accumulators. Null if a kernel of its own computes dQ.
  float* dq_sums;
  i64 rows;  // of a head, a multiple of backward_row_unit
  // In the workspace, of a persistent grid, and where dQ is added in a fixed order: the next turn that no
  // block has taken, and for each part of the rows of each head with places of its own the consumers' warps
  // that have added the last dQ of a place to the sums, [batch, place_heads, row_parts]. Null elsewhere.
  u32 *next_turn, *places_done;
  // A block of the grid has the keys of a place for so many query heads, a divisor of a group. An entry of
  // the batch has so many heads with places of their own.
  int place_group, place_heads;
  // A place has part_rows rows of each of these heads: the rows are divided into row_parts. Mostly it has all
  // rows. part_rows is a multiple of backward_row_unit.
  int row_parts, part_rows;
  u32 section;  // such heads whose keys the grid takes together: see KeyBlock
  // In the workspace, dK / scale and dV / dv_scale: [num_heads_kv, key_rows,
  // cuda_backward_row(head_dim or head_dim_v)], ordered as dQ's sums. Blocks of the grid that have some query
  // heads of a group or some rows add to them. Null if a block has all rows of all heads of a group.
  float *dk_sums, *dv_sums;
  i64 key_rows;  // of a head, a multiple of backward_row_unit
  // In the workspace, for masks whose keys keep no intervals of rows: [1 or num_heads_q, key_rows /
  // backward_row_unit, row_words] RowBits (cuda/row_bits.cuh) of blocks of row_block rows.
  void* row_bits;
  int row_words, row_block;
  static constexpr float most_scale = 4096;
  // Factors of weights and of delta in the workspace, and of dV's sums: see place_dropout_scale().
  float weight_scale = 1, delta_scale = 1, dv_scale = 1;
  // In the workspace, where dQ is added in a fixed order: the blocks of keys that have been added to dQ's
  // sums, [num_heads_q, rows / 64, 2], for each consumer (cuda/backward_sm90a_order.cuh). Null elsewhere.
  u32* dq_blocks_added;

  // With dropout of scale s. of_weights: weights take it by a shift of lse, which costs nothing.
  //   w' = s w        dV = sum of w' dO        dS = w' (dP - delta / s)
  // A pair that dropout drops has no w' in dV and no dP. Else kept pairs take kept_scale(). Weights are
  // rounded to 16 bits, so most of a huge scale is left to the end.
  FLASHJIT_FN void place_dropout_scale(bool of_weights) {
    constexpr float least = 0x1p-60f;
    dv_scale = max(dropout.scale / most_scale, 1.0f);
    if (!of_weights) return;
    // If all pairs drop, s is 0: no weight then matters, but delta does.
    weight_scale = min(max(dropout.scale, least), most_scale);
    delta_scale = 1 / max(dropout.scale, least);
    scale *= dv_scale;
  }
  FLASHJIT_FN float kept_scale() const { return min(dropout.scale, most_scale); }

  // Heads with places of their own in the schedule, over batch entries: a part of the rows counts as a head.
  FLASHJIT_FN u32 schedule_heads() const { return static_cast<u32>(batch * place_heads * row_parts); }

  // The first row of a batch entry's sequence. Packed sequences need no table: rounding down (first packed
  // row + batch * unit) leaves each at least its length, rounded up.
  FLASHJIT_FN i64 first_row(int entry, int first_q, bool varlen) const {
    return first_row_of(entry, first_q, seqlen_q, varlen);
  }
  // The same of key_rows.
  FLASHJIT_FN i64 first_key_row(int entry, int first_k, bool varlen) const {
    return first_row_of(entry, first_k, seqlen_k, varlen);
  }
  FLASHJIT_FN static i64 first_row_of(int entry, int first, int seqlen, bool varlen) {
    const i64 unit = backward_row_unit;
    return varlen ? (first / unit + entry) * unit : entry * ((seqlen + unit - 1) / unit * unit);
  }
};

// The rows of a head in the workspace, at least a unit: of `batch` sequences of at most `seqlen` rows, or if
// total >= 0 packed in so many rows.
FLASHJIT_FN constexpr i64 backward_rows(i64 batch, i64 seqlen, i64 total) {
  constexpr i64 unit = backward_row_unit;
  return total >= 0 ? (total / unit + batch) * unit
                    : batch * (max((seqlen + unit - 1) / unit, i64{1}) * unit);
}

}  // namespace flashjit::device
