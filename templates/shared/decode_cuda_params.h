// A decode's parameters on GPUs.
#pragma once

#include "shared/decode_params.h"

namespace flashjit::device {

// With batch_invariant: keys of a part. Parts begin at its multiples.
constexpr int fixed_part_keys = 512;

// The second kernel's block: threads, and bytes of shared memory.
constexpr int decode_merge_threads = 256, decode_merge_shared = decode_merge_threads * 24;

// The second kernel's blocks have all columns of a row, or 128: a wide row's columns are then several
// blocks', so that more threads share its parts. With batch_invariant the threads that share them are always
// the same.
FLASHJIT_FN constexpr int decode_merge_columns(int head_dim_v, bool batch_invariant) {
  return head_dim_v > 256 && head_dim_v % 128 == 0 && !batch_invariant ? 128 : head_dim_v;
}

// Threads of the second kernel that may share the parts of a row's columns, four for each thread.
FLASHJIT_FN constexpr int decode_merge_members(int columns) {
  const int teams = decode_merge_threads / (columns / 4);
  return teams < 2 ? 1 : teams < 4 ? 2 : teams < 8 ? 4 : 8;
}

// With batch_invariant: sums in which a row's parts are added up, part i in lane i modulo their number. Each
// is a member's.
FLASHJIT_FN constexpr int decode_lanes(int head_dim_v) {
  return decode_merge_members(decode_merge_columns(head_dim_v, true));
}

// With batch_invariant: a part's blocks of keys are dealt out to so many streams, each with a softmax of its
// own. A step has a block of each. Groups of warps have one each, or take turns at them.
FLASHJIT_FN constexpr int decode_streams(int head_dim_v, bool quantised) {
  return head_dim_v > 256 ? 2 : quantised ? 8 : 4;
}

// A tile has the query heads of one key/value head, or some of them, at some positions. Its row r is position
// r / tile_heads of head r % tile_heads. The tiles of a batch entry come in the order [key/value head, tile
// of heads, tile of positions].
struct CudaDecodeParams : DecodeParams {
  int group;  // query heads of a key/value head
  int tile_heads, tile_positions;
  int head_tiles;     // tiles of heads of a key/value head
  u32 heads_inverse;  // r / tile_heads is r * heads_inverse >> 16 for r < 256

  // In the workspace. A slot has the partial result of a tile. Each block of the grid has two: one for a tile
  // that an earlier block began, and one for a tile that it begins and a later block ends. With
  // batch_invariant each part has a slot: [batch, most_tiles, most_parts]. Where one block has all parts of a
  // tile, lane i is in the slot of part i, its state in that of the part that it took last.
  float* parts_o;  // [slots, tile_heads * tile_positions, head_dim_v], relative to the state's reference
  // [slots, rounds, tile_heads * tile_positions, 2]: the reference, in log2, of a row's weights, and their
  // sum. Apart, because float32 has no room for both in one number where the reference is far from 0.
  // rounds: 1, or with batch_invariant as many as the groups of warps take for a part.
  float* parts_state;
  int most_tiles, most_parts;
  int blocks;  // of the first kernel's grid

  FLASHJIT_FN int tile_rows() const { return tile_heads * tile_positions; }
  // The slot of part i of a tile that block `first` begins.
  FLASHJIT_FN i64 shared_slot(u32 first, int i) const { return 2 * (i64{first} + i) + (i == 0 ? 1 : 0); }
  FLASHJIT_FN i64 fixed_slot(int entry, int tile, int part) const {
    return (i64{entry} * most_tiles + tile) * most_parts + part;
  }
};

}  // namespace flashjit::device
