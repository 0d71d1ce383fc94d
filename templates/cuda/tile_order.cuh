// Which tile a block of the grid computes.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

struct TileIndex {
  int batch, head_q, m_block;
};

// Heads come in sections whose K and V together stay in L2. Within a section the last rows go first, since
// with a causal mask they are the longest, and the heads of a section take turns.
FLASHJIT_FN TileIndex tile_index(const ForwardParams& p, int tile, int block_m, int bytes_per_key) {
  constexpr int l2_share = 16 << 20;
  const int m_blocks = ceil_div(p.seqlen_q, block_m);
  const int heads = p.batch * p.num_heads_q;
  const int kv_heads = max(l2_share / bytes_per_key / max(p.seqlen_k, 1), 1);
  const int section = min(kv_heads * (p.num_heads_q / p.num_heads_kv), heads);
  const int index = tile / (section * m_blocks);
  const int within = tile - index * section * m_blocks;
  const int size = min(section, heads - index * section);
  const int row = within / size;
  const int head = index * section + within - row * size;
  const int batch = head / p.num_heads_q;
  return {batch, head - batch * p.num_heads_q, m_blocks - 1 - row};
}

}  // namespace flashjit::device
