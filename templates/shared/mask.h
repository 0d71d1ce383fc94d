// Masks, for GPU and CPU alike, in both directions: key blocks for given query rows (forward, decode) and
// query blocks for given keys (backward). Rows and keys are positions within one (batch entry, query head); a
// kernel that packs the heads of a GQA group into its rows maps a packed row to its position before it asks.
//
// A mask is a struct M with
//   M(const Params&, const Problem&)     cheap; reads its run-time data from the kernel's params, which
//                                        outlive it
//   static constexpr bool row_intervals  every row keeps exactly the keys hull(Keys{}, {row, row + 1})
//   static constexpr bool per_head       differs between query heads of one KV head (forbids GQA packing)
//   static constexpr bool padding        gives batch entries lengths of their own (see problem.h)
//   static constexpr int list_rows       rows [i * list_rows, (i + 1) * list_rows) share a list of key
//   blocks;
//                                        0: there are no lists
//   Span hull(Keys, Span rows)           an interval of keys outside which none of the rows keeps anything
//   Span hull(Queries, Span keys)        the same, the other way
//   bool whole(Span rows, Span keys)     true only if every pair is kept
//   bool keep(int row, int key)          the per-element test
//   Tile tile()                          the same test for kernels: its bits(row, key) are those of 16 keys
//                                        from `key` on, a multiple of 16, lowest first, all others 0. It
//                                        remembers what it looked up last: ask for neighbours in turn. Only
//                                        bits of positions within the sequences count.
//   Cursor<Keys>, Cursor<Queries>        what a walk remembers between calls of previous()
//   int previous(Axis, Span across, int bound, Cursor&)
//                                        the largest position < bound along Axis that `across` may keep, or
//                                        negative; bounds of successive calls never increase
// To add one: derive from Interval if its hull says all, write the functor here or in a header of its own,
// name it in the tables of codegen (codegen/README.md).
#pragma once

#include "shared/problem.h"

namespace flashjit::device {

// Half-open interval of positions.
struct Span {
  int begin, end;
  FLASHJIT_FN constexpr bool empty() const { return begin >= end; }
  FLASHJIT_FN constexpr int size() const { return end - begin; }
  FLASHJIT_FN constexpr bool contains(int i) const { return begin <= i && i < end; }
  FLASHJIT_FN constexpr bool contains(Span s) const { return begin <= s.begin && s.end <= end; }
};

FLASHJIT_FN constexpr Span intersect(Span a, Span b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

// The axis that a walk moves along.
struct Keys {};
struct Queries {};

// Keys that a tile answers for at once.
constexpr int bits_keys = 16;
inline constexpr u32 all_bits = 0xffff;

// The bits of keys [key, key + 16) that lie in `kept`.
FLASHJIT_FN constexpr u32 interval_bits(Span kept, int key) {
  const int begin = min(max(kept.begin - key, 0), bits_keys), end = min(max(kept.end - key, 0), bits_keys);
  return ((1u << end) - 1) & ~((1u << begin) - 1);
}

// Base of masks whose hull is all there is to know about skipping.
template <class Derived>
struct Interval {
  static constexpr bool row_intervals = true;
  static constexpr bool per_head = false;
  static constexpr bool padding = false;
  static constexpr int list_rows = 0;
  template <class Axis>
  struct Cursor {};

  struct Tile {
    const Derived& mask;
    FLASHJIT_FN u32 bits(int row, int key) const {
      return interval_bits(mask.hull(Keys{}, {row, row + 1}), key);
    }
  };
  FLASHJIT_FN Tile tile() const { return {*static_cast<const Derived*>(this)}; }

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>&) const {
    const Span h = static_cast<const Derived*>(this)->hull(axis, across);
    const int last = min(bound, h.end) - 1;
    return last >= h.begin ? last : -1;
  }
};

// The sequence's own limits; part of every composition.
struct Bounds : Interval<Bounds> {
  int seqlen_q, seqlen_k;

  template <class Params>
  FLASHJIT_FN Bounds(const Params&, const Problem& p) : seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k) {}

  FLASHJIT_FN Span hull(Keys, Span) const { return {0, seqlen_k}; }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, seqlen_q}; }
  FLASHJIT_FN bool whole(Span rows, Span keys) const { return rows.end <= seqlen_q && keys.end <= seqlen_k; }
  FLASHJIT_FN bool keep(int row, int key) const { return row < seqlen_q && key < seqlen_k; }
};

// Lengths of each batch entry: the problem has them, and Bounds keeps to them.
struct Padding : Interval<Padding> {
  static constexpr bool padding = true;
  template <class Params>
  FLASHJIT_FN Padding(const Params&, const Problem&) {}
  FLASHJIT_FN Span hull(Keys, Span) const { return {0, 0x7fffffff}; }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, 0x7fffffff}; }
  FLASHJIT_FN bool whole(Span, Span) const { return true; }
  FLASHJIT_FN bool keep(int, int) const { return true; }
};

enum class Align { top_left, bottom_right };

// The key that row 0 is aligned with.
template <Align align>
FLASHJIT_FN int aligned_key(const Problem& p) {
  return align == Align::bottom_right ? p.seqlen_k - p.seqlen_q : 0;
}

// Row i keeps keys j <= i + shift.
template <Align align>
struct Causal : Interval<Causal<align>> {
  int shift;

  template <class Params>
  FLASHJIT_FN Causal(const Params&, const Problem& p) : shift(aligned_key<align>(p)) {}

  FLASHJIT_FN Span hull(Keys, Span rows) const { return {0, rows.end + shift}; }
  FLASHJIT_FN Span hull(Queries, Span keys) const { return {max(keys.begin - shift, 0), 0x7fffffff}; }
  FLASHJIT_FN bool whole(Span rows, Span keys) const { return keys.end - 1 <= rows.begin + shift; }
  FLASHJIT_FN bool keep(int row, int key) const { return key <= row + shift; }
};

// Intersection of two masks; Intersect<A, B, C> nests them.
template <class A, class B>
struct Both {
  A a;
  B b;
  static constexpr bool row_intervals = A::row_intervals && B::row_intervals;
  static constexpr bool per_head = A::per_head || B::per_head;
  static constexpr bool padding = A::padding || B::padding;
  static constexpr int list_rows =
      A::list_rows == 0 || (B::list_rows != 0 && B::list_rows < A::list_rows) ? B::list_rows : A::list_rows;
  struct Tile {
    typename A::Tile a;
    typename B::Tile b;
    FLASHJIT_FN u32 bits(int row, int key) { return a.bits(row, key) & b.bits(row, key); }
  };
  template <class Axis>
  struct Cursor {
    typename A::template Cursor<Axis> a;
    typename B::template Cursor<Axis> b;
  };

  template <class Params>
  FLASHJIT_FN Both(const Params& params, const Problem& p) : a(params, p), b(params, p) {}

  template <class Axis>
  FLASHJIT_FN Span hull(Axis axis, Span across) const {
    return intersect(a.hull(axis, across), b.hull(axis, across));
  }
  FLASHJIT_FN bool whole(Span rows, Span keys) const { return a.whole(rows, keys) && b.whole(rows, keys); }
  FLASHJIT_FN bool keep(int row, int key) const { return a.keep(row, key) && b.keep(row, key); }
  FLASHJIT_FN Tile tile() const { return {a.tile(), b.tile()}; }

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>& cursor) const {
    for (;;) {
      const int pa = a.previous(axis, across, bound, cursor.a);
      if (pa < 0) return -1;
      const int pb = b.previous(axis, across, pa + 1, cursor.b);
      if (pb == pa || pb < 0) return pb;
      bound = pb + 1;
    }
  }
};

template <class First, class... Rest>
struct IntersectOf {
  using type = Both<First, typename IntersectOf<Rest...>::type>;
};
template <class Only>
struct IntersectOf<Only> {
  using type = Only;
};
template <class... Masks>
using Intersect = typename IntersectOf<Masks...>::type;

// Whether `rows` may keep any of `keys`.
template <class Mask>
FLASHJIT_FN bool touches(const Mask& mask, Span rows, Span keys) {
  const Span kept = intersect(mask.hull(Keys{}, rows), keys);
  if (kept.empty() || rows.empty()) return false;
  typename Mask::template Cursor<Keys> cursor{};
  return Mask::row_intervals || mask.previous(Keys{}, rows, kept.end, cursor) >= kept.begin;
}

// One block of a walk: positions [index * size, (index + 1) * size) along its axis.
struct Block {
  int index;
  bool whole;  // every pair with `across` is kept: no per-element test needed
};

FLASHJIT_FN constexpr Span block_span(int index, int size) {
  return {index * size, (index + 1) * size};
}

// Visits, last to first, the blocks of `size` positions along Axis that may hold anything which `across`
// keeps and that touch `within` (a split's share; multiples of `size`, or the whole sequence). `across` holds
// valid positions only. No kept pair is missed; a block without one is visited only where an intersection's
// masks each keep something there, or where a hull is wider than what is kept. Two walks built from equal
// arguments visit the same list: producer and consumers each own one.
template <class Axis, class Mask>
class BlockWalk {
 public:
  FLASHJIT_FN BlockWalk(const Mask& mask, Span across, int size, Span within = {0, 0x7fffffff})
      : mask_(mask), across_(across), size_(size) {
    const Span h = intersect(mask.hull(Axis{}, across), within);
    const bool empty = h.empty() || across.empty();
    next_ = empty ? -1 : (h.end - 1) / size;
    first_ = empty ? 0 : max(h.begin, 0) / size;
    end_ = h.end;
  }

  FLASHJIT_FN bool next(Block& block) {
    if constexpr (!Mask::row_intervals) {
      if (next_ >= first_) {
        const int bound = min((next_ + 1) * size_, end_);
        const int position = mask_.previous(Axis{}, across_, bound, cursor_);
        next_ = position < 0 ? -1 : position / size_;
      }
    }
    if (next_ < first_) return false;
    block.index = next_;
    block.whole = is_whole(Axis{}, block_span(next_, size_));
    --next_;
    return true;
  }

 private:
  FLASHJIT_FN bool is_whole(Keys, Span keys) const { return mask_.whole(across_, keys); }
  FLASHJIT_FN bool is_whole(Queries, Span rows) const { return mask_.whole(rows, across_); }

  const Mask& mask_;
  Span across_;
  int size_, next_, first_, end_;
  [[no_unique_address]] typename Mask::template Cursor<Axis> cursor_{};
};

}  // namespace flashjit::device
