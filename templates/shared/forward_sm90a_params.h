// Parameters of sm_90a's forward.
#pragma once

#include "shared/forward_params.h"
#include "shared/tensor_map.h"

namespace flashjit::device {

struct Sm90aForwardParams : ForwardParams {
  // TileOrder::sections: heads whose tiles are worked on together, and complete rounds of a persistent grid
  // in them.
  int section_heads, section_rounds;
  // Query heads of one key/value head whose rows share tiles, a divisor of their number; 1 without pack_gqa.
  // r / packed_heads is r * packed_heads_inverse >> 16 for r < 256.
  int packed_heads;
  u32 packed_heads_inverse;
};

// The kernel's second parameter: asm that is given a map's address counts as reading and writing all that
// lies beside it. 4-D [batch, heads, rows, dim], where heads are packed q as [batch, rows, heads, dim].
struct ForwardMaps {
  TensorMap q, k, v;
};

}  // namespace flashjit::device
