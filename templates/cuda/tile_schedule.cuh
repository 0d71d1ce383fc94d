// Which tiles a block of a persistent grid computes, and when.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

enum class TileOrder {
  heads,          // all rows of a head, the last first, then the next head's
  pairs,          // the same, a head's longest tile with its shortest: of equal length under a causal mask
  longest_first,  // the last rows of all heads, then those before: the most even, but K and V come from
                  // further
};

struct Tile {
  int batch, head_q, m_block;
};

// The tiles of this block. Producer and consumers each walk their own.
template <TileOrder order, int block_m>
class TileSchedule {
 public:
  FLASHJIT_FN explicit TileSchedule(const ForwardParams& p)
      : heads_(p.num_heads_q),
        all_heads_(p.batch * p.num_heads_q),
        m_blocks_(ceil_div(p.seqlen_q, block_m)),
        unit_(blockIdx.x) {}

  FLASHJIT_FN bool next(Tile& tile) {
    if (second_of_pair_ >= 0) {
      tile.m_block = second_of_pair_;
      second_of_pair_ = -1;
      return true;
    }
    // Units are at most 2^31 - 1 and so is the grid: sums fit 32 bits without a sign.
    const u32 units_per_head = order == TileOrder::pairs ? (m_blocks_ + 1) / 2 : m_blocks_;
    if (unit_ >= units_per_head * all_heads_) return false;
    u32 head;
    if constexpr (order == TileOrder::longest_first) {
      head = unit_ % all_heads_;
      tile.m_block = m_blocks_ - 1 - unit_ / all_heads_;
      // Over the grid and back again, so that the same blocks do not always get the longer one.
      unit_ += 2 * (backwards_ ? blockIdx.x : gridDim.x - 1 - blockIdx.x) + 1;
      backwards_ = !backwards_;
    } else {
      const int i = unit_ % units_per_head;
      head = unit_ / units_per_head;
      tile.m_block = m_blocks_ - 1 - i;
      if (order == TileOrder::pairs && i < tile.m_block) second_of_pair_ = i;
      unit_ += gridDim.x;
    }
    tile.head_q = head % heads_;
    tile.batch = head / heads_;
    return true;
  }

 private:
  u32 heads_, all_heads_;
  int m_blocks_;
  u32 unit_;
  int second_of_pair_ = -1;
  bool backwards_ = false;
};

}  // namespace flashjit::device
