// A decode's parameters on GPUs.
#pragma once

#include "shared/decode_params.h"

namespace flashjit::device {

// A tile whose keys several blocks of the grid have worked on: its place, and the number of its parts.
struct SplitTile {
  int batch, tile, parts;  // parts 0: there is no such tile
};

// A tile has the query heads of one key/value head, or some of them, at some positions. Its row r is position
// r / tile_heads of head r % tile_heads. The tiles of a batch entry come in the order [key/value head, tile
// of heads, tile of positions].
struct CudaDecodeParams : DecodeParams {
  int tile_heads, tile_positions;
  int head_tiles;     // tiles of heads of a key/value head
  u32 heads_inverse;  // r / tile_heads is r * heads_inverse >> 16 for r < 256

  // In the workspace, for each block of the grid: its partial results for a tile that an earlier block began
  // and for a tile that it begins and a later block ends; and the latter tile.
  float* parts_o;    // [blocks, 2, block_m, head_dim_v], normalised
  float* parts_lse;  // [blocks, 2, block_m]
  SplitTile* split;  // [blocks]
};

// The place of part i of a tile that block `first` begins, in parts_o and parts_lse.
FLASHJIT_FN constexpr int part_slot(int first, int i) {
  return 2 * (first + i) + (i == 0 ? 1 : 0);
}

}  // namespace flashjit::device
