// Which tiles a block of a persistent grid computes, and when.
#pragma once

#include "cuda/tile_rows.cuh"
#include "shared/tile_waves.h"

namespace flashjit::device {

enum class TileOrder {
  heads,     // all rows of a head, the last first, then the next head's
  sections,  // for a diagonal: the longest tiles first, in sections of heads whose K and V stay in L2
             // together; at the end what is left of all sections, the shortest tiles
  waves,     // as heads, where nobody knows which tiles are long: the blocks of each row of the grid take
             // fewer of them than those of the row before
};

struct Tile {
  int batch, head_q, m_block;  // the first head of those packed
};

// The tiles of this block, one a round. All blocks take the same number of rounds; where nothing is left for
// one, it gets a tile of rows past the end.
template <TileOrder order, class Rows>
class TileSchedule {
 public:
  FLASHJIT_FN explicit TileSchedule(const ForwardParams& p)
      : rows_(p),
        heads_q_(p.num_heads_q / rows_.heads),
        heads_(p.batch * heads_q_),
        m_blocks_(ceil_div(p.seqlen_q, rows_.tokens)),
        section_heads_(p.section_heads),
        section_rounds_(p.section_rounds) {}

  FLASHJIT_FN u32 rounds() const {
    if constexpr (order == TileOrder::heads) return rounds_of_all();
    if constexpr (order == TileOrder::waves) return wave().rounds;
    const u32 tiles = section_heads_ * m_blocks_, taken = section_rounds_ * gridDim.x;
    return first_left() + (tiles > taken ? count((tiles - taken) * sections(), gridDim.x) : 0);
  }

  FLASHJIT_FN Tile tile(u32 round) const {
    u32 head, m_block;
    if constexpr (order != TileOrder::sections) {
      if constexpr (order == TileOrder::waves) round += wave().first_round;
      const u32 index = round * gridDim.x + blockIdx.x;
      if (index >= heads_ * m_blocks_) return nothing();
      head = index / m_blocks_;
      m_block = index % m_blocks_;
    } else {
      // There and back again, so that the same blocks do not always get the longer tiles.
      const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      u32 section, index;  // of a section's tiles, the longest first
      if (round < first_left()) {
        section = round / section_rounds_;
        index = round % section_rounds_ * gridDim.x + place;
      } else {
        const u32 left = (round - first_left()) * gridDim.x + place;
        section = left % sections();
        index = section_rounds_ * gridDim.x + left / sections();
      }
      const u32 first = section * section_heads_, size = min(section_heads_, heads_ - first);
      if (index >= size * m_blocks_) return nothing();
      head = first + index % size;
      m_block = index / size;
    }
    return {static_cast<int>(head / heads_q_), static_cast<int>(head % heads_q_) * rows_.heads,
            static_cast<int>(m_blocks_ - 1 - m_block)};
  }

 private:
  FLASHJIT_FN Tile nothing() const { return {0, 0, static_cast<int>(m_blocks_)}; }
  // Of groups of `size`. Counts of tiles are at most 2^31 - 1, and so is the grid: sums fit 32 bits.
  static FLASHJIT_FN u32 count(u32 n, u32 size) { return (n + size - 1) / size; }
  FLASHJIT_FN u32 rounds_of_all() const { return count(heads_ * m_blocks_, gridDim.x); }
  FLASHJIT_FN TileWave wave() const { return wave_of(blockIdx.y, rounds_of_all()); }
  FLASHJIT_FN u32 sections() const { return count(heads_, section_heads_); }
  FLASHJIT_FN u32 first_left() const { return sections() * section_rounds_; }

  Rows rows_;
  u32 heads_q_, heads_;  // as many as tiles have: those packed into one count once
  u32 m_blocks_, section_heads_, section_rounds_;
};

}  // namespace flashjit::device
