// Sliding windows: a row sees the keys around its own, with or without the first keys of the sequence.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

// Row i is aligned with key a = i + shift and keeps keys a - left <= j <= a + right. Sizes and positions may
// be near the largest int: they are bounded before they are added, so that sums cannot overflow.
template <Align align>
struct SlidingWindow : Interval<SlidingWindow<align>> {
  int shift, left, right, seqlen_q, seqlen_k;

  template <class Params>
  FLASHJIT_FN SlidingWindow(const Params& params, const Problem& p)
      : shift(aligned_key<align>(p)),
        left(params.window_left),
        right(params.window_right),
        seqlen_q(p.seqlen_q),
        seqlen_k(p.seqlen_k) {}

  FLASHJIT_FN Span hull(Keys, Span rows) const { return {begin_of(rows.begin), end_of(rows.end - 1)}; }
  FLASHJIT_FN Span hull(Queries, Span keys) const {
    // Row i keeps key j if i + shift + right >= j and i + shift - left <= j.
    const int first = keys.begin - shift, last = keys.end - 1 - shift;
    return {max(first, right) - right, min(last, seqlen_q - 1 - left) + left + 1};
  }
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    return begin_of(rows.end - 1) <= keys.begin && keys.end <= end_of(rows.begin);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return begin_of(row) <= key && key < end_of(row); }

 private:
  FLASHJIT_FN int begin_of(int row) const { return max(row + shift, left) - left; }
  FLASHJIT_FN int end_of(int row) const { return min(row + shift, seqlen_k - 1 - right) + right + 1; }
};

// A sliding window and the first num_sinks keys ("attention sinks", Xiao et al. 2023).
template <Align align>
struct SlidingWindowWithSinks {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = false;
  static constexpr bool padding = false;
  static constexpr int list_rows = 0;
  template <class Axis>
  struct Cursor {};

  SlidingWindow<align> window;
  int num_sinks;

  template <class Params>
  FLASHJIT_FN SlidingWindowWithSinks(const Params& params, const Problem& p)
      : window(params, p), num_sinks(min(params.num_sinks, p.seqlen_k)) {}

  FLASHJIT_FN Span hull(Keys axis, Span rows) const {
    const Span h = window.hull(axis, rows);
    return num_sinks == 0 ? h : Span{0, h.empty() ? num_sinks : max(h.end, num_sinks)};
  }
  FLASHJIT_FN Span hull(Queries axis, Span keys) const {
    return keys.begin < num_sinks ? Span{0, window.seqlen_q} : window.hull(axis, keys);
  }
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    // The window alone decides on keys after the sinks.
    return keys.end <= num_sinks || window.whole(rows, {max(keys.begin, num_sinks), keys.end});
  }
  FLASHJIT_FN bool keep(int row, int key) const { return key < num_sinks || window.keep(row, key); }

  struct Tile {
    const SlidingWindowWithSinks& mask;
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) const {
      mask.window.tile().template bits<keys>(row, key, words);
      for (int i = 0; i < words_of<keys>; ++i) words[i] |= low_bits(mask.num_sinks - key - i * word_keys);
    }
  };
  FLASHJIT_FN Tile tile() const { return {*this}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int) const {
    return tile();
  }
  FLASHJIT_FN int found(const Cursor<Keys>&, Span) const { return not_found; }
  FLASHJIT_FN int look_up(Span, Span) const { return not_found; }

  FLASHJIT_FN int previous(Keys axis, Span rows, int bound, Cursor<Keys>&) const {
    const Span h = window.hull(axis, rows);
    const int last = min(bound, h.end) - 1, sink = min(bound, num_sinks) - 1;
    return last >= h.begin ? max(last, sink) : sink;
  }
  FLASHJIT_FN int previous(Queries axis, Span keys, int bound, Cursor<Queries>&) const {
    const Span h = hull(axis, keys);
    const int last = min(bound, h.end) - 1;
    return last >= h.begin ? last : -1;
  }
};

}  // namespace flashjit::device
