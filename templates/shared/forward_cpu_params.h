// Parameters of the CPUs' forward.
#pragma once

#include "shared/forward_params.h"

namespace flashjit::device {

struct CpuForwardParams : ForwardParams {
  // Query heads of one key/value head whose rows share tiles, a divisor of their number.
  int packed_heads;
  // Rows of a tile, a multiple of 16 up to block_m; parts that a tile's keys are worked on in. With more than
  // one of these room for what they give, and how many of each tile have.
  int tile_rows, key_parts;
  float* partials;  // [tiles, key_parts, cpu_part()], 64-byte aligned
  u32* arrived;     // [tiles]
};

}  // namespace flashjit::device
