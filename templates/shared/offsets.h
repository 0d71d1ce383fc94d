// Positions of a shard: the launch's rows and keys are a part of longer sequences, from an offset of each
// batch entry on. Bounds, tensors and tiles go by the launch's own rows and keys, masks and dropout by those
// of the whole. A kernel of a spec with offsets includes this header; formulas take formula_offsets.h, too.
#pragma once

#include "shared/key_gap.h"
#include "shared/read_keys.h"
#include "shared/score.h"

namespace flashjit::device {

struct OffsetParams {
  const i64 *row, *key;  // of each batch entry
  i64 row_stride, key_stride;
};

// Params: those of the kernel, with all that a spec adds otherwise.
template <class Params>
struct WithOffsets : Params {
  OffsetParams position_offsets;
};
template <class Params>
inline constexpr bool has_gradients<WithOffsets<Params>> = has_gradients<Params>;

// The most rows or keys of the whole, as of any sequence.
constexpr int longest_whole = 1 << 30;

// CPUs' launches have been refused if this changes anything. `length`: of the launch's longest sequence.
FLASHJIT_FN int clamped_offset(const i64* offsets, i64 stride, int batch, int length) {
  return static_cast<int>(max(min(offsets[batch * stride], i64{longest_whole} - length), i64{0}));
}

template <class Params>
struct PositionOffsets {
  static constexpr bool exist = true;

  template <class Base>
  FLASHJIT_FN static int of_rows(const Base& p, int batch) {
    const OffsetParams& offsets = static_cast<const Params&>(p).position_offsets;
    return clamped_offset(offsets.row, offsets.row_stride, batch, p.seqlen_q);
  }
  template <class Base>
  FLASHJIT_FN static int of_keys(const Base& p, int batch) {
    const OffsetParams& offsets = static_cast<const Params&>(p).position_offsets;
    return clamped_offset(offsets.key, offsets.key_stride, batch, p.seqlen_k);
  }
};

// A mask of the whole, for the rows and keys of a shard. Masks are made with a problem that ends where the
// shard does.
template <class Mask, class Params, bool interval = Mask::row_intervals>
struct OffsetMask;

template <class Mask, class Params>
struct OffsetMaskBase {
  static constexpr bool row_intervals = Mask::row_intervals;
  static constexpr bool per_head = Mask::per_head;
  static constexpr bool padding = Mask::padding;
  static constexpr int list_rows = Mask::list_rows;

  int row_offset, key_offset;
  Mask mask;

  template <class Base>
  FLASHJIT_FN OffsetMaskBase(const Base& p, const Problem& of)
      : row_offset(PositionOffsets<Params>::of_rows(p, of.batch)),
        key_offset(PositionOffsets<Params>::of_keys(p, of.batch)),
        mask(p, whole_problem(of)) {}

  FLASHJIT_FN Span hull(Keys axis, Span rows) const {
    const Span of_whole = rows_of_whole(rows), h = mask.hull(axis, of_whole), gap = key_gap(mask, of_whole);
    return own_keys({gap.contains(key_offset) ? gap.end : h.begin, h.end});
  }
  FLASHJIT_FN Span hull(Queries axis, Span keys) const {
    return own(row_offset, mask.hull(axis, keys_of_whole(keys)));
  }
  FLASHJIT_FN bool whole(Span rows, Span keys, int found = not_found) const {
    return mask.whole(rows_of_whole(rows), keys_of_whole(keys), found);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return mask.keep(row + row_offset, key + key_offset); }

  FLASHJIT_FN Span rows_of_whole(Span rows) const { return of_whole(row_offset, rows); }
  FLASHJIT_FN Span keys_of_whole(Span keys) const { return of_whole(key_offset, keys); }
  FLASHJIT_FN Span own_keys(Span keys) const { return own(key_offset, keys); }

 protected:
  // Ends may be the largest int.
  FLASHJIT_FN static int of_whole(int offset, int position) {
    return min(position, 0x7fffffff - offset) + offset;
  }
  FLASHJIT_FN static Span of_whole(int offset, Span s) {
    return {of_whole(offset, s.begin), of_whole(offset, s.end)};
  }
  FLASHJIT_FN static Span own(int offset, Span s) {
    return {max(s.begin, offset) - offset, max(s.end, offset) - offset};
  }

 private:
  FLASHJIT_FN Problem whole_problem(Problem of) const {
    of.seqlen_q += row_offset;
    of.seqlen_k += key_offset;
    return of;
  }
};

template <class Mask, class Params>
struct OffsetMask<Mask, Params, true> : OffsetMaskBase<Mask, Params>, Interval<OffsetMask<Mask, Params>> {
  using Base = OffsetMaskBase<Mask, Params>;
  using Base::Base;
  using Base::hull, Base::keep, Base::list_rows, Base::padding, Base::per_head, Base::row_intervals,
      Base::whole;
};

template <class Mask, class Params>
struct OffsetMask<Mask, Params, false> : OffsetMaskBase<Mask, Params> {
  using Base = OffsetMaskBase<Mask, Params>;
  using Base::Base;
  template <class Axis>
  using Cursor = typename Mask::template Cursor<Axis>;

  struct Tile {
    typename Mask::Tile tile;
    int row_offset, key_offset;

    FLASHJIT_FN bool asks_masks() const { return tile.asks_masks(); }

    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) {
      row += row_offset;
      key += key_offset;
      if constexpr (Mask::list_rows > 0) {
        // Edges of listed blocks lie at multiples of 16 keys.
        if (key % keys != 0) {
          const int first = key & ~15, shift = key & 15;
          for (int i = 0; i < words_of<keys>; ++i) {
            const int at = first + i * word_keys;
            const u64 some = tile.half(row, at) | tile.half(row, at + 16) << 16 |
                             static_cast<u64>(tile.half(row, at + 32)) << 32;
            words[i] = static_cast<u32>(some >> shift);
          }
          return;
        }
      }
      tile.template bits<keys>(row, key, words);
    }
  };
  FLASHJIT_FN Tile tile() const { return {this->mask.tile(), this->row_offset, this->key_offset}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int found) const {
    // Other tiles may span several listed blocks.
    if (this->row_offset % rows != 0 || this->key_offset % keys != 0) return tile();
    return {this->mask.template tile<rows, keys>(found), this->row_offset, this->key_offset};
  }
  FLASHJIT_FN int found(const Cursor<Keys>& cursor, Span keys) const {
    return this->mask.found(cursor, this->keys_of_whole(keys));
  }
  FLASHJIT_FN int look_up(Span rows, Span keys) const {
    return this->mask.look_up(this->rows_of_whole(rows), this->keys_of_whole(keys));
  }
  FLASHJIT_FN int previous(Keys axis, Span rows, int bound, Cursor<Keys>& cursor) const {
    const int at = this->of_whole(this->key_offset, bound);
    return this->mask.previous(axis, this->rows_of_whole(rows), at, cursor) - this->key_offset;
  }
  FLASHJIT_FN int previous(Queries axis, Span keys, int bound, Cursor<Queries>& cursor) const {
    const int at = this->of_whole(this->row_offset, bound);
    return this->mask.previous(axis, this->keys_of_whole(keys), at, cursor) - this->row_offset;
  }
};

template <class Mask, class Params>
FLASHJIT_FN Span key_gap(const OffsetMask<Mask, Params>& mask, Span rows) {
  return mask.own_keys(key_gap(mask.mask, mask.rows_of_whole(rows)));
}
template <class Mask, class Params>
FLASHJIT_FN Span hull_of_heads(const OffsetMask<Mask, Params>& mask, Span rows) {
  return mask.own_keys(hull_of_heads(mask.mask, mask.rows_of_whole(rows)));
}

}  // namespace flashjit::device
