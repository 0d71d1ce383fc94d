// The division of a decode's keys among the blocks of a grid: every block takes an equal, contiguous share of
// all steps of all tiles ("stream-K", Osama et al. 2023), however lengths differ. A tile may be shared by
// several blocks; a block may take parts of several tiles. All of it follows from lengths in device memory,
// so they may change between launches.
#pragma once

#include "shared/decode_cuda_params.h"
#include "shared/key_gap.h"
#include "shared/mask.h"

namespace flashjit::device {

// The steps that a tile takes through its keys. Step i covers `step_keys` keys from at(i) * step_keys on.
struct KeySteps {
  int first, count;
  int gap_begin, gap;  // steps from gap_begin on lie `gap` further on

  FLASHJIT_FN int at(int i) const { return first + i < gap_begin ? first + i : first + i + gap; }
};

FLASHJIT_FN KeySteps key_steps(Span hull, Span gap, int step_keys) {
  if (hull.empty()) return {0, 0, 0, 0};
  const int first = hull.begin / step_keys, end = (hull.end - 1) / step_keys + 1;
  const int gap_begin = gap.empty() ? end : min(max((gap.begin - 1) / step_keys + 1, first), end);
  const int skipped = max(min(gap.end / step_keys, end) - gap_begin, 0);
  return {first, end - first - skipped, gap_begin, skipped};
}

// The work of one batch entry.
struct DecodeEntry {
  // A tile costs as much as so many steps beyond its own: its rows come and go. One at least, so that tiles
  // without keys are somebody's.
  static constexpr int tile_cost = 1;

  Problem problem;  // of the first head
  Span keys, gap;   // the rows see no key outside `keys` or inside `gap`
  KeySteps steps;
  int position_tiles, tiles;

  template <class Mask, bool varlen>
  FLASHJIT_FN static DecodeEntry make(const CudaDecodeParams& p, int batch, int step_keys) {
    DecodeEntry e;
    e.problem = decode_problem<varlen>(p, batch, 0);
    const Span rows = {0, e.problem.seqlen_q};
    const Mask mask(p, e.problem);
    e.keys = rows.empty() ? Span{0, 0} : mask.hull(Keys{}, rows);
    e.gap = rows.empty() ? Span{0, 0} : key_gap(mask, rows);
    e.steps = key_steps(e.keys, e.gap, step_keys);
    e.position_tiles = ceil_div(rows.end, p.tile_positions);
    e.tiles = e.position_tiles * p.num_heads_kv * p.head_tiles;
    return e;
  }
  FLASHJIT_FN int tile_units() const { return steps.count + tile_cost; }
  FLASHJIT_FN i64 units() const { return i64{tiles} * tile_units(); }
};

// Equal shares of `total` units for the blocks of a grid. The first `used` blocks have one.
struct DecodeShares {
  static constexpr int least_units = 2;  // of a block

  i64 total;
  int used;

  FLASHJIT_FN DecodeShares(i64 units, int blocks)
      : total(units), used(static_cast<int>(min(max(units / least_units, i64{1}), i64{blocks}))) {}
  // For block <= used.
  FLASHJIT_FN i64 begin(int block) const { return total * block / used; }
  FLASHJIT_FN int block_of(i64 unit) const { return static_cast<int>(((unit + 1) * used - 1) / total); }
};

// A tile's rows.
struct DecodeTile {
  int head_kv, first_head;  // first_head: of q
  int heads;                // that the tile has of the key/value head's group
  int first_position, positions;
};

FLASHJIT_FN DecodeTile decode_tile(const CudaDecodeParams& p, const DecodeEntry& entry, int tile) {
  const int group = p.num_heads_q / p.num_heads_kv;
  const int heads_index = tile / entry.position_tiles, position_tile = tile % entry.position_tiles;
  const int head_tile = heads_index % p.head_tiles;
  DecodeTile t;
  t.head_kv = heads_index / p.head_tiles;
  t.first_head = t.head_kv * group + head_tile * p.tile_heads;
  t.heads = min(p.tile_heads, group - head_tile * p.tile_heads);
  t.first_position = position_tile * p.tile_positions;
  t.positions = min(p.tile_positions, entry.problem.seqlen_q - t.first_position);
  return t;
}

// A block's part of one tile: steps [begin, end).
struct DecodeSegment {
  int tile;
  int begin, end;
  bool starts, finishes;  // the tile
};

// A block's walk through its share. `batch` and `skipped`: the batch entry in which the share begins, and the
// units of that entry before it.
template <class Mask, bool varlen>
class DecodeWalk {
 public:
  FLASHJIT_FN DecodeWalk(const CudaDecodeParams& p, int step_keys, i64 begin, i64 end, int batch, i64 skipped)
      : p_(p), step_keys_(step_keys), position_(begin), end_(end), batch_(batch) {
    if (begin >= end) return;
    entry_ = DecodeEntry::make<Mask, varlen>(p, batch, step_keys);
    tile_ = static_cast<int>(skipped / entry_.tile_units());
    unit_ = static_cast<int>(skipped % entry_.tile_units());
  }

  // The batch entry of the segment that next() returned last.
  FLASHJIT_FN const DecodeEntry& entry() const { return entry_; }
  FLASHJIT_FN int batch() const { return batch_; }
  // The unit after the tile of that segment.
  FLASHJIT_FN i64 tile_end() const { return tile_end_; }

  FLASHJIT_FN bool next(DecodeSegment& segment) {
    if (position_ >= end_) return false;
    while (tile_ == entry_.tiles) {
      entry_ = DecodeEntry::make<Mask, varlen>(p_, ++batch_, step_keys_);
      tile_ = 0;
    }
    const int units = entry_.tile_units();
    const int take = static_cast<int>(min(i64{units - unit_}, end_ - position_));
    segment.tile = tile_;
    segment.begin = max(unit_ - DecodeEntry::tile_cost, 0);
    segment.end = max(unit_ + take - DecodeEntry::tile_cost, 0);
    segment.starts = unit_ == 0;
    segment.finishes = unit_ + take == units;
    tile_end_ = position_ + (units - unit_);
    position_ += take;
    unit_ += take;
    if (segment.finishes) {
      unit_ = 0;
      ++tile_;
    }
    return true;
  }

 private:
  const CudaDecodeParams& p_;
  int step_keys_;
  i64 position_, end_, tile_end_;
  int batch_, tile_, unit_;
  DecodeEntry entry_;
};

}  // namespace flashjit::device
