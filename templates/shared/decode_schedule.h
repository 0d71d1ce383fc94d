// The division of a decode's keys among the blocks of a grid: every block takes an equal, contiguous share of
// all units of all tiles ("stream-K", Osama et al. 2023), however lengths differ. A tile may be shared by
// several blocks; a block may take parts of several tiles. All of it follows from lengths in device memory,
// so they may change between launches.
//
// A unit is one step of the kernel through its keys. With batch_invariant it is a part of fixed_part_keys
// keys, which begins at a multiple of that, and each unit is a part of its own. So parts and their order are
// the same whatever else is in the batch. A row's parts are added up in lanes: part i in lane i modulo
// decode_lanes(), lanes at last. This is a block's work for a tile of which it has all parts, else the second
// kernel's.
#pragma once

#include "shared/decode_cuda_params.h"
#include "shared/equal_shares.h"
#include "shared/key_gap.h"
#include "shared/mask.h"

namespace flashjit::device {

// The units of a tile: unit i covers keys [at(i), at(i) + 1) * unit_keys.
struct KeyUnits {
  int first, count;
  int gap_begin, gap;  // units from gap_begin on lie `gap` further on

  FLASHJIT_FN int at(int i) const { return first + i < gap_begin ? first + i : first + i + gap; }
  // Of the units that are, modulo `lanes`, `lane`, the last one up to `bound`; -1 without any. lanes: a power
  // of two.
  FLASHJIT_FN int last(int bound, int lane, int lanes) const {
    const auto up_to = [&](int unit) { return unit - ((unit - lane) & (lanes - 1)); };
    int unit = up_to(bound);
    if (unit >= gap_begin && unit < gap_begin + gap) unit = up_to(gap_begin - 1);
    return unit < first ? -1 : unit;
  }
};

FLASHJIT_FN KeyUnits key_units(Span hull, Span gap, int unit_keys) {
  if (hull.empty()) return {0, 0, 0, 0};
  const int first = hull.begin / unit_keys, end = (hull.end - 1) / unit_keys + 1;
  const int gap_begin = gap.empty() ? end : min(max((gap.begin - 1) / unit_keys + 1, first), end);
  const int skipped = max(min(gap.end / unit_keys, end) - gap_begin, 0);
  return {first, end - first - skipped, gap_begin, skipped};
}

// A block's part of one tile: units [begin, end). With batch_invariant it is one round of one unit.
struct DecodeSegment {
  int tile;
  int begin, end;
  bool starts, finishes;    // the tile
  bool whole_tile = false;  // with batch_invariant: the block has all of the tile
  int round = 0;
};

// The work of one batch entry. Spec is the kernel's: its Mask, varlen and batch_invariant count. A fixed part
// is walked through `rounds` times, each time through other blocks of each step.
template <class Spec, int step_keys, int rounds_ = 1>
struct DecodeEntry {
  static constexpr int rounds = rounds_;
  static constexpr bool fixed_parts = Spec::batch_invariant;
  static constexpr int unit_keys = fixed_parts ? fixed_part_keys : step_keys;
  static constexpr int unit_steps = unit_keys / step_keys;
  static_assert(unit_keys % step_keys == 0 && (fixed_parts || rounds == 1));
  // A tile costs as much as so many units beyond its own: its rows come and go.
  static constexpr int tile_cost = fixed_parts ? 0 : 1;

  Problem problem;  // of the first head
  Span keys, gap;   // the rows see no key outside `keys` or inside `gap`
  KeyUnits units;   // of each tile
  int position_tiles, tiles;

  DecodeEntry() = default;
  FLASHJIT_FN DecodeEntry(const CudaDecodeParams& p, int batch)
      : problem(decode_problem<Spec::varlen>(p, batch, 0)) {
    const Span rows = {0, problem.seqlen_q};
    typename Spec::Mask mask(p, problem);
    see_heads(mask, {0, p.num_heads_q});
    keys = rows.empty() ? Span{0, 0} : searched_hull(mask, rows);
    gap = rows.empty() ? Span{0, 0} : key_gap(mask, rows);
    units = key_units(keys, gap, unit_keys);
    // Nearly always one: a division takes long.
    position_tiles = rows.end <= p.tile_positions ? min(rows.end, 1) : ceil_div(rows.end, p.tile_positions);
    tiles = position_tiles * p.num_heads_kv * p.head_tiles;
  }

  // At least one, so that tiles without keys are somebody's.
  FLASHJIT_FN int tile_units() const { return max(units.count + tile_cost, 1); }
  FLASHJIT_FN int all_units() const { return tiles * tile_units(); }

  // The steps of units [begin, end) that have keys: steps() of them, the i-th at step().
  FLASHJIT_FN int steps(int begin, int end) const {
    if (!fixed_parts || begin == end) return end - begin;
    return last_step(begin) - first_step(begin);
  }
  FLASHJIT_FN int step(int begin, int i) const {
    return fixed_parts ? first_step(begin) + i : units.at(begin + i);
  }
  // The place of a segment's i-th step in a sequence of all rounds of all steps.
  FLASHJIT_FN int step_in_rounds(const DecodeSegment& segment, int i) const {
    return rounds == 1 ? step(segment.begin, i) : step(segment.begin, i) * rounds + segment.round;
  }

 private:
  FLASHJIT_FN int first_step(int unit) const {
    return max(units.at(unit) * unit_steps, keys.begin / step_keys);
  }
  FLASHJIT_FN int last_step(int unit) const {
    return min((units.at(unit) + 1) * unit_steps, (keys.end - 1) / step_keys + 1);
  }
};

// A tile's rows.
struct DecodeTile {
  int head_kv, first_head;  // first_head: of q
  int heads;                // that the tile has of the key/value head's group
  int first_position, positions;

  template <class Entry>
  FLASHJIT_FN DecodeTile(const CudaDecodeParams& p, const Entry& entry, int tile) {
    const int heads_index = entry.position_tiles == 1 ? tile : tile / entry.position_tiles;
    const int position_tile = tile - heads_index * entry.position_tiles;
    head_kv = p.head_tiles == 1 ? heads_index : heads_index / p.head_tiles;
    const int head_tile = heads_index - head_kv * p.head_tiles;
    first_head = head_kv * p.group + head_tile * p.tile_heads;
    heads = min(p.tile_heads, p.group - head_tile * p.tile_heads);
    first_position = position_tile * p.tile_positions;
    positions = min(p.tile_positions, entry.problem.seqlen_q - first_position);
  }
};

// A block's walk through `left` units from a place on.
template <class Entry>
class DecodeWalk {
 public:
  FLASHJIT_FN DecodeWalk(const CudaDecodeParams& p, UnitPlace begin, u32 left)
      : p_(p), left_(static_cast<int>(left)), batch_(begin.batch) {
    if (left_ == 0) return;
    entry_ = Entry(p, batch_);
    tile_ = begin.skipped / entry_.tile_units();
    unit_ = begin.skipped - tile_ * entry_.tile_units();
  }

  // The batch entry of the segment that next() returned last.
  FLASHJIT_FN const Entry& entry() const { return entry_; }
  FLASHJIT_FN int batch() const { return batch_; }

  FLASHJIT_FN bool next(DecodeSegment& segment) {
    if (left_ == 0) return false;
    while (tile_ == entry_.tiles) {
      entry_ = Entry(p_, ++batch_);
      tile_ = 0;
    }
    const int units = entry_.tile_units();
    const int most = Entry::fixed_parts ? 1 : units - unit_;
    const int take = min(most, left_);
    segment.tile = tile_;
    segment.begin = max(unit_ - Entry::tile_cost, 0);
    segment.end = min(max(unit_ + take - Entry::tile_cost, 0), entry_.units.count);
    segment.starts = unit_ == 0;
    segment.finishes = unit_ + take == units;
    if constexpr (Entry::fixed_parts) {
      if (unit_ == 0 && round_ == 0) whole_tile_ = left_ >= units;
      segment.whole_tile = whole_tile_;
      segment.round = round_;
      if (++round_ < Entry::rounds) {
        segment.finishes = false;
        return true;
      }
      round_ = 0;
    }
    left_ -= take;
    unit_ += take;
    if (segment.finishes) {
      unit_ = 0;
      ++tile_;
    }
    return true;
  }

 private:
  const CudaDecodeParams& p_;
  int left_, batch_, tile_, unit_;
  int round_ = 0;  // that comes next
  bool whole_tile_ = false;
  Entry entry_;
};

}  // namespace flashjit::device
