// What a launch hands to device code whatever the operation is: sizes, lengths, masks, dropout. An operation
// adds its tensors (forward_params.h), a family of kernels its schedule (forward_sm80_params.h): by
// inheritance, each in a header of its own, so that what one adds changes no key of another's kernels.
// Internal: layouts may change with any version, since host and device sides are always of the same one.
#pragma once

#include "shared/tensor_view.h"

namespace flashjit::device {

// block_sparse: compressed rows. For query block i of `block_m` rows, the key blocks that it may see are
// blocks[offsets[i]] ... blocks[offsets[i + 1] - 1], ascending. Indices out of range see nothing.
struct BlockLists {
  const int* offsets;  // [row_blocks + 1] of one batch entry and query head
  i64 batch_stride, head_stride;
  const int* blocks;      // [num_blocks]
  const int* bitmask_of;  // [num_blocks]: which of the bitmasks says what a block keeps, -1: all of it; may
                          // be null: all of all
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
  const u64* seed_at;  // both are read when the kernel runs; null: the values below
  const u64* offset_at;
  u64 seed, offset;
  u32 below;    // p * 2^32
  float scale;  // 1 / (1 - p) of what is left; 0 for p = 1
};

// Instructions that ptxas chooses for sm_90a depend on offsets: check them after a change of the order.
struct ProblemParams {
  DropoutParams dropout;    // unset where the spec has none
  const int* cu_seqlens_q;  // [batch + 1], varlen only
  const int* cu_seqlens_k;  // [batch + 1], varlen only
  int batch;
  int num_heads_q, num_heads_kv;
  int seqlen_q, seqlen_k;  // varlen: the longest that the caller promises
  int total_q, total_k;    // varlen: rows of the packed tensors

  // What the spec's masks need; otherwise unset.
  const int* seqlens_q;           // padding: [batch], null: seqlen_q
  const int* seqlens_k;           // padding: [batch], null: seqlen_k
  int window_left, window_right;  // sliding_window: >= 0
  int num_sinks;                  // its keys that every row sees
  BlockLists blocks;
  TreeBits tree;
};

}  // namespace flashjit::device
