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
  // Of the units that are, modulo `lanes`, `lane`, the last one up to `bound`, itself no unit of the gap; -1
  // without any. lanes: a power of two.
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

// A block's part of one tile: units [begin, end).
struct DecodeSegment {
  int tile;
  int begin, end;
  bool starts, finishes;  // the tile
};

// What is added up at once: the units of a segment, or with batch_invariant one round of one of them.
struct DecodeRound {
  int begin, end;
  int round = 0;
  bool last = true;  // of the segment
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

  // Calls each(DecodeRound) for a segment; once if it has no units.
  template <class Each>
  FLASHJIT_FN static void each_round(const DecodeSegment& segment, const Each& each) {
    if constexpr (!fixed_parts) {
      each(DecodeRound{segment.begin, segment.end});
    } else {
      const int last = max(segment.end - 1, segment.begin);
#pragma unroll 1
      for (int unit = segment.begin; unit <= last; ++unit)
#pragma unroll 1
        for (int round = 0; round < rounds; ++round)
          each(DecodeRound{unit, min(unit + 1, segment.end), round, unit == last && round == rounds - 1});
    }
  }
  // The steps of a round that have keys: steps() of them, the i-th at step(), in a sequence of all rounds of
  // all steps.
  FLASHJIT_FN int steps(const DecodeRound& of) const {
    if (!fixed_parts || of.begin == of.end) return of.end - of.begin;
    return last_step(of.begin) - first_step(of.begin);
  }
  FLASHJIT_FN int step(const DecodeRound& of, int i) const {
    return fixed_parts ? (first_step(of.begin) + i) * rounds + of.round : units.at(of.begin + i);
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
    const int take = min(units - unit_, left_);
    segment.tile = tile_;
    segment.begin = max(unit_ - Entry::tile_cost, 0);
    segment.end = min(max(unit_ + take - Entry::tile_cost, 0), entry_.units.count);
    segment.starts = unit_ == 0;
    segment.finishes = unit_ + take == units;
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
  Entry entry_;
};

}  // namespace flashjit::device
