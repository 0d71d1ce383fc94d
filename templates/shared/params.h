// Parameters of every launch, for any operation: sizes, lengths, masks, dropout. An operation adds its
// tensors (forward_params.h) by inheritance, a family of kernels its schedule (forward_sm80_params.h). Each
// addition has a header of its own, so that it changes no cache key of other kernels. Layouts are internal
// and may change with any version: host and device code are always of the same version.
#pragma once

#include "shared/tensor_view.h"

namespace flashjit::device {

// block_sparse: compressed rows. Query block i of `block_m` rows may see the key blocks blocks[offsets[i]]
// ... blocks[offsets[i + 1] - 1], in ascending order. An index out of range sees nothing.
struct BlockLists {
  const int* offsets;  // [row_blocks + 1] of one batch entry and query head
  i64 batch_stride, head_stride;
  const int* blocks;      // [num_blocks]
  const int* bitmask_of;  // [num_blocks]: number of the bitmask; -1: the block is whole; null: all are
  const u32* bitmasks;    // [num_bitmasks, block_m, ceil(block_n / 32)]; bit j of a word: its j-th key
  int row_blocks, num_blocks, num_bitmasks;
};

// tree: row i sees all keys before the prefix's end, and key prefix + j if bit j of its words is set.
struct TreeBits {
  const u32* words;  // [rows, words_per_row] of one batch entry
  i64 batch_stride, row_stride;
  int rows, words_per_row;
  const int* prefix_lengths;  // [batch]; null: seqlen_k - seqlen_q
};

// dropout (shared/dropout.h).
struct DropoutParams {
  const u64* seed_at;  // both are read when the kernel runs; null: seed and offset hold the values
  const u64* offset_at;
  u64 seed, offset;
  u32 below;    // p * 2^32
  float scale;  // factor of the weights that are kept: 1 / (1 - p), 0 for p = 1
};

// ptxas chooses instructions for sm_90a by the offsets of members: check them after a change of the order.
struct ProblemParams {
  DropoutParams dropout;    // unset without dropout
  const int* cu_seqlens_q;  // [batch + 1], varlen only
  const int* cu_seqlens_k;  // [batch + 1], varlen only
  int batch;
  int num_heads_q, num_heads_kv;
  int seqlen_q, seqlen_k;  // varlen: the longest that the caller promises
  int total_q, total_k;    // varlen: rows of the packed tensors

  // Arguments of the spec's masks; unset for other masks.
  const int* seqlens_q;           // padding: [batch], null: seqlen_q
  const int* seqlens_k;           // padding: [batch], null: seqlen_k
  int window_left, window_right;  // sliding_window: >= 0
  int num_sinks;                  // sliding_window: the first keys, which every row sees
  BlockLists blocks;
  TreeBits tree;
};

}  // namespace flashjit::device
