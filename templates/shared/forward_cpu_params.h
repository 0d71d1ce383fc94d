// Parameters of the forward on CPUs.
#pragma once

#include "shared/forward_params.h"

namespace flashjit::device {

struct CpuForwardParams : ForwardParams {
  // Number of query heads of one key/value head whose rows share tiles. It divides num_heads_q /
  // num_heads_kv.
  int packed_heads;
  // Rows of a tile, a multiple of 16 up to block_m; parts into which a tile's keys are divided.
  int tile_rows, key_parts;
  // If key_parts > 1: the partial results, and how many parts of each tile are finished.
  float* partials;  // [tiles, key_parts, cpu_part()], 64-byte aligned
  u32* arrived;     // [tiles]
};

}  // namespace flashjit::device
