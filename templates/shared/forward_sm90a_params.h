// Parameters of the forward of sm_90a.
#pragma once

#include "shared/forward_params.h"
#include "shared/tensor_map.h"

namespace flashjit::device {

struct Sm90aForwardParams : ForwardParams {
  // With TileOrder::sections: the heads of a section, and the complete rounds of the persistent grid in each
  // section.
  int section_heads, section_rounds;
  // Number of query heads of one key/value head whose rows share tiles; 1 without pack_gqa. It divides
  // num_heads_q / num_heads_kv. r / packed_heads is r * packed_heads_inverse >> 16 for r < 256.
  int packed_heads;
  u32 packed_heads_inverse;
  // Each tile's keys are divided among so many tiles of the schedule; 1: they are not. A part has part_blocks
  // blocks of block_n keys or a few less, or more if the parts would be too many, so that tiles with few keys
  // have fewer parts.
  int parts, part_blocks;
  // In the workspace, [tiles, parts, consumer warps] of a warp's 16 rows: their output in the order of
  // accumulators; maximum (log2) and sum of each row; [tiles, consumer warps] how many parts are written.
  float *parts_o, *parts_state;
  u32 *parts_done, num_counters;
};

// Threads of the step that clears counters.
constexpr int forward_clear_threads = 256;

// The kernel's second parameter. Maps are a parameter of their own because inline assembly that gets a map's
// address counts as reading and writing everything beside the map. Maps are 4-D, [batch, heads, rows, dim]; q
// with packed heads is [batch, rows, heads, dim].
struct ForwardMaps {
  TensorMap q, k, v;
};

}  // namespace flashjit::device