// The tile that a block of the grid computes.
#pragma once

#include "cuda/tile_index.cuh"
#include "shared/platform.h"

namespace flashjit::device {

// Heads come in sections whose K and V together stay in L2. The heads of a section take turns. Within a
// section the last rows come first: with a causal mask they are the longest.
template <class Params>
FLASHJIT_FN TileIndex tile_index(const Params& p, int tile, int block_m) {
  const int m_blocks = ceil_div(p.seqlen_q, block_m);
  const int heads = p.batch * p.num_heads_q;
  const int index = tile / (p.section_heads * m_blocks);
  const int within = tile - index * p.section_heads * m_blocks;
  const int size = min(p.section_heads, heads - index * p.section_heads);
  const int row = within / size;
  const int head = index * p.section_heads + within - row * size;
  const int batch = head / p.num_heads_q;
  return {batch, head - batch * p.num_heads_q, m_blocks - 1 - row};
}

}  // namespace flashjit::device
