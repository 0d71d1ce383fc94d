// What a launch hands to device code, the same struct for GPU and CPU kernels. Internal: its layout may
// change with any version, since host and device sides are always of the same one (the header's digest is
// part of every key).
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// [batch, row, head, dim], strides in elements, dim contiguous. Packed tensors have batch stride 0.
struct TensorView {
  void* data;
  i64 batch_stride, row_stride, head_stride;
};

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

struct ForwardParams {
  TensorView q, k, v, o;
  TensorView lse;           // float32; data null where the spec has no lse
  const int* cu_seqlens_q;  // [batch + 1], varlen only
  const int* cu_seqlens_k;  // [batch + 1], varlen only
  int batch;
  int num_heads_q, num_heads_kv;
  int seqlen_q, seqlen_k;  // varlen: the longest that the caller promises
  int total_q, total_k;    // varlen: rows of the packed tensors
  float scale_log2;        // softmax_scale * log2(e): weights are powers of 2; finite, > 0

  // What the spec's masks need; otherwise unset.
  const int* seqlens_q;           // padding: [batch], null: seqlen_q
  const int* seqlens_k;           // padding: [batch], null: seqlen_k
  int window_left, window_right;  // sliding_window: >= 0
  int num_sinks;                  // its keys that every row sees
  BlockLists blocks;
  TreeBits tree;

  // sm_80, and sm_90a's TileOrder::sections: heads whose tiles are worked on together, and complete rounds of
  // a persistent grid in them.
  int section_heads, section_rounds;
  // sm_90a with pack_gqa, and CPUs: query heads of one key/value head whose rows share tiles, a divisor of
  // their number. r / packed_heads is r * packed_heads_inverse >> 16 for r < 256.
  int packed_heads;
  u32 packed_heads_inverse;  // sm_90a

  // CPUs (runtime/cpu/partition.hpp): rows of a tile, a multiple of 16 up to block_m; parts that a tile's
  // keys are worked on in. With more than one of these room for what they give, and how many of each tile
  // have.
  int tile_rows, key_parts;
  float* partials;  // [tiles, key_parts, cpu_part()], 64-byte aligned
  u32* arrived;     // [tiles]

  DropoutParams dropout;  // unset where the spec has none
};

// A CUtensorMap of the CUDA driver.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// sm_90a: its inputs as the copy engine wants them described; 4-D [batch, heads, rows, dim], where heads are
// packed q as [batch, rows, heads, dim].
struct ForwardMaps {
  TensorMap q, k, v;
};

}  // namespace flashjit::device
