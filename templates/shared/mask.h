// Masks, for GPU and CPU alike, in both directions: key blocks for given query rows (forward, decode) and
// query blocks for given keys (backward). Rows and keys are positions within one (batch entry, query head). A
// kernel that packs the heads of a GQA group into its rows maps a packed row to its position before it asks.
//
// A mask is a struct M with
//   M(const Params&, const Problem&)     cheap; reads its run-time data from the kernel's params, which
//                                        outlive it
//   static constexpr bool row_intervals  every row keeps exactly the keys hull(Keys{}, {row, row + 1}),
//                                        and, unless key_intervals says otherwise, every key the rows of
//                                        its hull
//   static constexpr bool per_head       differs between query heads of one KV head (forbids GQA packing)
//   static constexpr bool padding        gives batch entries lengths of their own (see problem.h)
//   static constexpr int list_rows       rows [i * list_rows, (i + 1) * list_rows) share a list of key
//                                        blocks; 0: there are no lists
//   Span hull(Keys, Span rows)           an interval of keys; the rows keep no key outside it
//   Span hull(Queries, Span keys)        an interval of rows; rows outside it keep none of the keys
//   bool whole(Span rows, Span keys, int found)
//                                        true only if every pair is kept
//   bool keep(int row, int key)          the per-element test
//   Tile tile()                          the same test for kernels. bits<n>(row, key, words) sets the bits of
//                                        the n keys from `key` on, lowest first; n is a multiple of 16, `key`
//                                        of n. Only bits of positions within the sequences count. A tile
//                                        remembers its last look-up: ask for neighbours in turn
//   Tile tile<rows, keys>(int found)     the tile of a block of `keys` keys, from a walk across `rows` rows;
//                                        both begin at multiples of their size
//   Cursor<Keys>, Cursor<Queries>        the memory of a walk between calls of previous()
//   int previous(Axis, Span across, int bound, Cursor&)
//                                        the largest position < bound along Axis that `across` may keep, or
//                                        negative; bounds of successive calls never increase
//   int found(const Cursor<Keys>&, Span keys)
//                                        the look-up of previous() for `keys`, which whole() and tile() need
//                                        not repeat; or not_found. `keys` holds the position that previous()
//                                        returned last
//   int look_up(Span rows, Span keys)    the same without a walk; not_found unless one listed block has all
//
// To add a mask: derive it from Interval if its hull says all, write the functor here or in a header of its
// own, name it in the tables of codegen (codegen/README.md).
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

// A number of rows that is known at run time only, for `rows` of tile().
inline constexpr int unknown_size = 0x7fffffff;

// The axis that a walk moves along.
struct Keys {};
struct Queries {};

// The result of a walk's look-up, for whole() and tile(): the number of a bitmask, or one of these.
inline constexpr int not_found = -3;  // nothing: look it up
inline constexpr int nowhere = -2, everywhere = -1;
inline constexpr int by_masks = -4;  // the block's other masks test it (shared/listed_mask.h)

// Bits of keys come in words of 32.
inline constexpr int word_keys = 32;
inline constexpr u32 all_bits = ~0u;
template <int keys>
constexpr int words_of = ceil_div(keys, word_keys);

FLASHJIT_FN constexpr u32 low_bits(int n) {
  return n <= 0 ? 0 : n >= word_keys ? all_bits : (1u << n) - 1;
}
// The bits of keys [key, key + 32) that lie in `kept`.
FLASHJIT_FN constexpr u32 interval_bits(Span kept, int key) {
  return low_bits(kept.end - key) & ~low_bits(kept.begin - key);
}

// Base of masks whose hull alone decides which blocks are skipped.
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
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) const {
      const Span kept = mask.hull(Keys{}, {row, row + 1});
      for (int i = 0; i < words_of<keys>; ++i) words[i] = interval_bits(kept, key + i * word_keys);
    }
  };
  FLASHJIT_FN Tile tile() const { return {*static_cast<const Derived*>(this)}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int) const {
    return tile();
  }
  FLASHJIT_FN int found(const Cursor<Keys>&, Span) const { return not_found; }
  FLASHJIT_FN int look_up(Span, Span) const { return not_found; }

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
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    return rows.end <= seqlen_q && keys.end <= seqlen_k;
  }
  FLASHJIT_FN bool keep(int row, int key) const { return row < seqlen_q && key < seqlen_k; }
};

// Lengths of each batch entry. The problem has them and Bounds applies them, so this mask keeps all.
struct Padding : Interval<Padding> {
  static constexpr bool padding = true;
  template <class Params>
  FLASHJIT_FN Padding(const Params&, const Problem&) {}
  FLASHJIT_FN Span hull(Keys, Span) const { return {0, 0x7fffffff}; }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, 0x7fffffff}; }
  FLASHJIT_FN bool whole(Span, Span, int = not_found) const { return true; }
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
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    return keys.end - 1 <= rows.begin + shift;
  }
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
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) {
      u32 of_b[words_of<keys>];
      a.template bits<keys>(row, key, words);
      b.template bits<keys>(row, key, of_b);
      for (int i = 0; i < words_of<keys>; ++i) words[i] &= of_b[i];
    }
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
  FLASHJIT_FN bool whole(Span rows, Span keys, int found = not_found) const {
    return a.whole(rows, keys, found) && b.whole(rows, keys, found);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return a.keep(row, key) && b.keep(row, key); }
  FLASHJIT_FN Tile tile() const { return {a.tile(), b.tile()}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int found) const {
    return {a.template tile<rows, keys>(found), b.template tile<rows, keys>(found)};
  }
  // At most one mask of an intersection finds anything.
  FLASHJIT_FN int found(const Cursor<Keys>& cursor, Span keys) const {
    const int of_a = a.found(cursor.a, keys);
    return of_a != not_found ? of_a : b.found(cursor.b, keys);
  }
  FLASHJIT_FN int look_up(Span rows, Span keys) const {
    const int of_a = a.look_up(rows, keys);
    return of_a != not_found ? of_a : b.look_up(rows, keys);
  }

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>& cursor) const {
    for (int pa = a.previous(axis, across, bound, cursor.a); pa >= 0;) {
      const int pb = b.previous(axis, across, pa + 1, cursor.b);
      if (pb == pa || pb < 0) return pb;
      pa = a.previous(axis, across, pb + 1, cursor.a);
      if (pa == pb) return pa;
    }
    return -1;
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

// Whether rows of one head may see more keys than others, and keys be seen by more rows.
template <class Mask>
inline constexpr bool makes_work_differ = true;
template <>
inline constexpr bool makes_work_differ<Bounds> = false;

// Whether a mask has formulas (formula_mask.h). Formulas skip blocks by a search, and kernels test them
// element by element.
template <class Mask>
inline constexpr bool has_formula = false;
template <class A, class B>
inline constexpr bool has_formula<Both<A, B>> = has_formula<A> || has_formula<B>;

// Whether every key is kept by exactly the rows hull(Queries{}, {key, key + 1}).
template <class Mask>
inline constexpr bool key_intervals = Mask::row_intervals;
template <class A, class B>
inline constexpr bool key_intervals<Both<A, B>> = key_intervals<A> && key_intervals<B>;
// Whether a hull is all that a walk along the axis needs.
template <class Mask>
FLASHJIT_FN constexpr bool hulls_are_exact(Keys) {
  return Mask::row_intervals;
}
template <class Mask>
FLASHJIT_FN constexpr bool hulls_are_exact(Queries) {
  return key_intervals<Mask>;
}

// hull(Keys{}, rows), as small as a search makes it. A kernel asks once for many blocks.
template <class Mask>
FLASHJIT_FN Span searched_hull(const Mask& mask, Span rows) {
  return mask.hull(Keys{}, rows);
}
template <class A, class B>
FLASHJIT_FN Span searched_hull(const Both<A, B>& mask, Span rows) {
  return intersect(searched_hull(mask.a, rows), searched_hull(mask.b, rows));
}
// Says for which query heads the mask is asked; without it, for its problem's.
template <class Mask>
FLASHJIT_FN void see_heads(Mask&, Span) {}
template <class A, class B>
FLASHJIT_FN void see_heads(Both<A, B>& mask, Span heads) {
  see_heads(mask.a, heads);
  see_heads(mask.b, heads);
}

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
  int found;   // for tile<rows, keys>()
};

FLASHJIT_FN constexpr Span block_span(int index, int size) {
  return {index * size, (index + 1) * size};
}

// Visits blocks of `size` positions along Axis, last to first. A block is visited if `across` may keep
// anything in it and if it touches `within` (a split's share, or the whole sequence). `across` holds valid
// positions only. No kept pair is missed. A block without a kept pair is visited only if each mask of an
// intersection keeps something there, or if a hull is wider than the kept positions. Two walks built from
// equal arguments visit the same blocks: producer and consumers each own one.
template <class Axis, class Mask>
class BlockWalk {
 public:
  FLASHJIT_FN BlockWalk(const Mask& mask, Span across, int size, Span within = {0, 0x7fffffff})
      : mask_(mask), across_(across), size_(size) {
    // Without intervals, previous() takes the hull into account.
    const Span h = hulls_are_exact<Mask>(Axis{}) ? intersect(mask.hull(Axis{}, across), within) : within;
    const bool empty = h.empty() || across.empty();
    first_ = empty ? 0 : max(h.begin, 0) / size;
    next_ = empty ? -1 : (h.end - 1) / size;
    end_ = h.end;
  }

  // Leaves part `index` of the hull, in parts of so many blocks. The last part has all that follow. aligned:
  // parts begin at multiples of their size, so that the hull's first one may be shorter.
  FLASHJIT_FN void take_part(int index, int blocks, bool last, bool aligned = false) {
    if constexpr (!hulls_are_exact<Mask>(Axis{})) {
      const Span h = mask_.hull(Axis{}, across_);
      first_ = max(h.begin, 0) / size_;
      if (next_ >= 0) next_ = h.empty() ? -1 : (h.end - 1) / size_;
      end_ = h.end;
    }
    const int begin = (aligned ? first_ / blocks * blocks : first_) + index * blocks;
    first_ = max(first_, begin);
    if (!last) next_ = min(next_, begin + blocks - 1);
  }

  FLASHJIT_FN bool next(Block& block) {
    if constexpr (!hulls_are_exact<Mask>(Axis{})) {
      if (next_ >= first_) {
        // Avoids (next_ + 1) * size_ beyond the largest int.
        const int bound = next_ >= end_ / size_ ? end_ : (next_ + 1) * size_;
        const int position = mask_.previous(Axis{}, across_, bound, cursor_);
        next_ = position < 0 ? -1 : position / size_;
      }
    }
    if (next_ < first_) return false;
    block.index = next_;
    look_at(Axis{}, block_span(next_, size_), block);
    --next_;
    return true;
  }

 private:
  FLASHJIT_FN void look_at(Keys, Span keys, Block& block) const {
    block.found = mask_.found(cursor_, keys);
    block.whole = mask_.whole(across_, keys, block.found);
  }
  FLASHJIT_FN void look_at(Queries, Span rows, Block& block) const {
    block.found = not_found;
    block.whole = mask_.whole(rows, across_);
  }

  const Mask& mask_;
  Span across_;
  int size_, next_, first_, end_;
  [[no_unique_address]] typename Mask::template Cursor<Axis> cursor_{};
};

}  // namespace flashjit::device
