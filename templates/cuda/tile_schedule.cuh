// The tiles of a block of a persistent grid, and their order.
#pragma once

#include "cuda/tile_index.cuh"
#include "shared/tile_waves.h"

namespace flashjit::device {

enum class TileOrder {
  heads,     // all rows of a head, the last rows first, then the next head
  sections,  // for masks with a diagonal: the longest tiles first, in sections of heads whose K and V
             // stay in L2 together; at the end the remaining tiles of all sections, the shortest. Before
             // them come turned heads, with short sequences
  waves,     // as `heads`, for tiles of unknown length: the blocks of each row of the grid compute fewer
             // tiles than the blocks of the row before
};

// The direction of a schedule with TileOrder::sections. Backwards a block has the same tiles, those of the
// last round first.
struct Forwards {
  FLASHJIT_FN u32 round(u32 next, u32 /*end*/) const { return next; }
};
struct EitherWay {
  bool backwards;
  FLASHJIT_FN u32 round(u32 next, u32 end) const { return backwards ? end - 1 - next : next; }
};

// The tiles of this block of the grid, one after the other.
template <TileOrder order, class Rows, class Direction = Forwards>
class TileSchedule {
 public:
  template <class Params>
  FLASHJIT_FN explicit TileSchedule(const Params& p, Direction direction = {})
      : direction_(direction),
        rows_(p),
        heads_q_(static_cast<u32>(p.num_heads_q) / static_cast<u32>(rows_.heads)),
        parts_(p.parts),
        heads_(p.batch * heads_q_ * parts_),
        m_blocks_(ceil_div(p.seqlen_q, rows_.tokens)),
        turned_heads_(p.turned_heads),
        section_heads_(p.section_heads),
        section_rounds_(p.section_rounds) {
    const u32 tiles = heads_ * m_blocks_, rounds = count(tiles, gridDim.x);
    if constexpr (order == TileOrder::sections) {
      const u32 of_section = section_heads_ * m_blocks_, taken = section_rounds_ * gridDim.x;
      next_ = 0;
      end_ = turned_rounds() + first_left() +
             (of_section > taken ? count((of_section - taken) * sections(), gridDim.x) : 0);
    } else {
      const TileWave wave = order == TileOrder::waves ? wave_of(blockIdx.y, rounds) : TileWave{0, rounds};
      next_ = wave.first_round * gridDim.x + blockIdx.x;
      end_ = min((wave.first_round + wave.rounds) * gridDim.x, tiles);
    }
  }

  // The part of the tile's keys, and its number among all parts of all tiles, if there are several.
  FLASHJIT_FN int part() const { return part_; }
  FLASHJIT_FN int place() const { return place_; }
  // Returns false if no tiles are left.
  FLASHJIT_FN bool next(TileIndex& tile) {
    if constexpr (order == TileOrder::sections) return next_in_sections(tile);
    if (next_ >= end_) return false;
    tile = make(next_ / m_blocks_, next_ % m_blocks_);
    next_ += gridDim.x;
    return true;
  }

 private:
  FLASHJIT_FN bool next_in_sections(TileIndex& tile) {
    while (next_ < end_) {
      u32 round = direction_.round(next_++, end_);
      if (round < turned_rounds()) {
        const u32 index = round * gridDim.x + blockIdx.x;
        if (index >= turned_heads_ * m_blocks_) continue;  // the last round, if all heads are turned
        tile = turned_tile(index);
        return true;
      }
      round -= turned_rounds();
      // A block may have no tile in some of the last rounds of a section. Every second round is reversed, so
      // that the same blocks do not always get the longer tiles.
      const u32 place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      u32 section, index;  // index: among the section's tiles, the longest first
      if (round < first_left()) {
        section = round / section_rounds_;
        index = round % section_rounds_ * gridDim.x + place;
      } else {
        const u32 left = (round - first_left()) * gridDim.x + place;
        section = left % sections();
        index = section_rounds_ * gridDim.x + left / sections();
      }
      const u32 first = turned_heads_ + section * section_heads_;
      const u32 size = min(section_heads_, heads_ - first);
      if (index >= size * m_blocks_) continue;
      tile = make(first + index % size, index / size);
      return true;
    }
    return false;
  }
  // All tiles of a turned head come together, so that its K and V are read from memory once. From round to
  // round a block goes on by one tile, over as many rounds as a head has tiles: these are even, and blocks
  // are not all at the same. Where fewer rounds are left, it gets a tile and then the one as far from the
  // other end: two rounds are even. Both hold but for heads whose tiles lie in two rounds.
  FLASHJIT_FN TileIndex turned_tile(u32 index) {
    const u32 head = index / m_blocks_, of_head = index % m_blocks_, round = head * m_blocks_ / gridDim.x;
    const u32 stay = m_blocks_ - gridDim.x % m_blocks_;  // added each round, it keeps a block at its tile
    if (round < turned_heads_ / gridDim.x * m_blocks_)
      return make(head, (of_head + round * (stay + 1) + round / m_blocks_) % m_blocks_);
    const u32 place = (of_head + round * stay) % m_blocks_;
    return make(head, round % 2 ? m_blocks_ - 1 - place : place);
  }
  FLASHJIT_FN u32 turned_rounds() const { return count(turned_heads_ * m_blocks_, gridDim.x); }
  // n / size, rounded up. Numbers of tiles and of blocks are at most 2^31 - 1 each, so sums fit 32 bits.
  static FLASHJIT_FN u32 count(u32 n, u32 size) { return (n + size - 1) / size; }
  FLASHJIT_FN u32 sections() const { return count(heads_ - turned_heads_, section_heads_); }
  FLASHJIT_FN u32 first_left() const { return sections() * section_rounds_; }
  FLASHJIT_FN TileIndex make(u32 head, u32 from_last) {
    const u32 m_block = m_blocks_ - 1 - from_last;
    if (parts_ > 1) {
      place_ = static_cast<int>(head * m_blocks_ + m_block);
      part_ = static_cast<int>(head % parts_);
      head /= parts_;
    }
    return {static_cast<int>(head / heads_q_), static_cast<int>(head % heads_q_) * rows_.heads,
            static_cast<int>(m_block)};
  }

  [[no_unique_address]] Direction direction_;
  Rows rows_;
  u32 heads_q_, parts_, heads_;  // heads packed into one tile count as one, those of each part as others
  int part_ = 0, place_ = 0;
  u32 m_blocks_, turned_heads_, section_heads_, section_rounds_;
  u32 next_, end_;  // rounds of the grid with TileOrder::sections, else tiles
};

}  // namespace flashjit::device
