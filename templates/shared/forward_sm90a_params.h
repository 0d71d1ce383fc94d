// Parameters of the forward of sm_90a.
#pragma once

#include "shared/forward_params.h"
#include "shared/tensor_map.h"

namespace flashjit::device {

struct Sm90aForwardParams : ForwardParams {
  // With TileOrder::sections: the heads before the sections, all of them or a multiple of the grid's blocks;
  // the heads of a section, and the complete rounds of the persistent grid in each section.
  int turned_heads, section_heads, section_rounds;
  // Number of query heads of one key/value head whose rows share tiles; 1 without pack_gqa. It divides
  // num_heads_q / num_heads_kv. r / packed_heads is r * packed_heads_inverse >> 16 for r < 256.
  int packed_heads;
  u32 packed_heads_inverse;
  // Each tile's keys are divided among so many tiles of the schedule; 1: they are not. A part has part_blocks
  // blocks of block_n keys; the last one has all that are left.
  int parts, part_blocks;
  // In the workspace, [heads, parts, tiles of a head, block_m]: a row's output, and its maximum (log2) and
  // sum.
  float *parts_o, *parts_state;
  // Where the device divides keys by their lengths (forward_sm90a_lengths.cuh), if parts is not 1: how many
  // shares there are at most; part_blocks is then the fewest blocks of a share. Parts of rows lie in the
  // order [blocks of the grid, 2, block_m]. In the workspace, for each share: the batch entry that it begins
  // and another one ends, or -1, and how many parts it has.
  int shares;
  void* begun;
};

// With batch_invariant a row's keys are added up in parts of so many blocks, which begin at multiples of
// that, whether a launch divides them or not. Heads of more than 256 columns have no parts then.
constexpr int forward_part_keys = 8192;
constexpr int most_forward_parts = 1 << 14;  // of all tiles of a launch: an announcement has room for so many
FLASHJIT_FN constexpr int forward_part_blocks(int block_n) {
  return (forward_part_keys + block_n - 1) / block_n;
}
FLASHJIT_FN constexpr bool forward_has_fixed_parts(bool batch_invariant, int head_dim, int head_dim_v) {
  return batch_invariant && head_dim <= 256 && head_dim_v <= 256;
}

// Threads of the step that merges parts, and how many rows they merge at once.
constexpr int forward_merge_threads = 256;
FLASHJIT_FN constexpr int forward_merge_rows(int head_dim_v) {
  return forward_merge_threads * 4 / head_dim_v;
}
// Where the device divides keys by their lengths: the most shares, columns of a row that a team of threads
// merges, blocks that a multiprocessor holds at once, and a block's shared memory: rows that teams exchange,
// sums of the warps and a message.
constexpr int most_forward_shares = 256, forward_merge_columns = 64, lengths_merge_blocks = 3;
constexpr int forward_merge_rows_bytes = forward_merge_threads * 24;
constexpr int lengths_merge_shared = forward_merge_rows_bytes + 16 + forward_merge_threads / 8;

// The kernel's second parameter. Maps are a parameter of their own because inline assembly that gets a map's
// address counts as reading and writing everything beside the map. Maps are 4-D, [batch, heads, rows, dim]; q
// with packed heads is [batch, rows, heads, dim].
struct ForwardMaps {
  TensorMap q, k, v;
};

}  // namespace flashjit::device