// Masks, for GPU and CPU alike, in both directions: key blocks for given query rows (forward, decode) and
// query blocks for given keys (backward). Rows and keys are positions within one (batch entry, query head); a
// kernel that packs the heads of a GQA group into its rows maps a packed row to its position before it asks.
//
// A mask is a struct M with
//   M(const Params&, const Problem&)     cheap; reads its run-time data from the kernel's params
//   static constexpr bool row_intervals  every row keeps exactly the keys hull(Keys{}, {row, row + 1})
//   static constexpr bool per_head       differs between query heads of one KV head (forbids GQA packing)
//   Span hull(Keys, Span rows)           an interval of keys outside which none of the rows keeps anything
//   Span hull(Queries, Span keys)        the same, the other way
//   bool whole(Span rows, Span keys)     true only if every pair is kept
//   bool keep(int row, int key)          the per-element test
//   Tile tile(Span rows, Span keys)      the same test within one tile, what kernels use: its keep(row, key)
//                                        looks up nothing that tile() could look up once
//   Cursor<Keys>, Cursor<Queries>        what a walk remembers between calls of previous()
//   int previous(Axis, Span across, int bound, Cursor&)
//                                        the largest position < bound along Axis that `across` may keep, or
//                                        -1; bounds of successive calls never increase
// To add one: derive from Interval if its hull says all, write the functor, render its name
// (codegen/render.cpp).
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

// Base of masks whose hull is all there is to know about skipping.
template <class Derived>
struct Interval {
  static constexpr bool row_intervals = true;
  static constexpr bool per_head = false;
  using Tile = Derived;
  template <class Axis>
  struct Cursor {};

  FLASHJIT_FN Derived tile(Span, Span) const { return *static_cast<const Derived*>(this); }

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

enum class Align { top_left, bottom_right };

// Row i keeps keys j <= i + shift.
template <Align align>
struct Causal : Interval<Causal<align>> {
  int shift;

  template <class Params>
  FLASHJIT_FN Causal(const Params&, const Problem& p)
      : shift(align == Align::bottom_right ? p.seqlen_k - p.seqlen_q : 0) {}

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
  struct Tile {
    typename A::Tile a;
    typename B::Tile b;
    FLASHJIT_FN bool keep(int row, int key) const { return a.keep(row, key) && b.keep(row, key); }
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
  FLASHJIT_FN Tile tile(Span rows, Span keys) const { return {a.tile(rows, keys), b.tile(rows, keys)}; }

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
