// Block lists that were made of other masks (shared/block_lists.h). A block that is listed whole needs no
// test by those masks, a block that is not listed keeps nothing, and the others test what is left. A list
// says nothing else than the masks, so a kernel whose tile has several listed blocks may ask for more tests.
#pragma once

#include "shared/block_sparse.h"

namespace flashjit::device {

template <class Blocks, class Others>
struct Listed {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = Blocks::per_head || Others::per_head;
  static constexpr bool padding = Others::padding;
  static constexpr int list_rows = Blocks::list_rows;
  template <class Axis>
  using Cursor = typename Blocks::template Cursor<Axis>;

  Blocks blocks;
  Others others;

  template <class Params>
  FLASHJIT_FN Listed(const Params& params, const Problem& p) : blocks(params, p), others(params, p) {}

  template <class Axis>
  FLASHJIT_FN Span hull(Axis axis, Span across) const {
    return intersect(blocks.hull(axis, across), others.hull(axis, across));
  }
  FLASHJIT_FN bool whole(Span rows, Span keys, int found = not_found) const {
    return blocks.whole(rows, keys, found);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return blocks.keep(row, key) && others.keep(row, key); }

  struct Tile {
    typename Blocks::Tile blocks;
    typename Others::Tile others;
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) {
      blocks.template bits<keys>(row, key, words);
      if (!blocks.asks_masks()) return;
      u32 of_others[words_of<keys>];
      others.template bits<keys>(row, key, of_others);
      for (int i = 0; i < words_of<keys>; ++i) words[i] &= of_others[i];
    }
  };
  FLASHJIT_FN Tile tile() const { return {blocks.tile(), others.tile()}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int found) const {
    return {blocks.template tile<rows, keys>(found), others.template tile<rows, keys>(not_found)};
  }
  FLASHJIT_FN int found(const Cursor<Keys>& cursor, Span keys) const { return blocks.found(cursor, keys); }
  FLASHJIT_FN int look_up(Span rows, Span keys) const { return blocks.look_up(rows, keys); }
  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>& cursor) const {
    return blocks.previous(axis, across, bound, cursor);
  }
};

template <class Blocks, class Others>
inline constexpr bool has_formula<Listed<Blocks, Others>> = has_formula<Others>;

template <class Blocks, class Others>
FLASHJIT_FN void see_heads(Listed<Blocks, Others>& mask, Span heads) {
  see_heads(mask.others, heads);
}
// For read_keys.h: each head may have lists of its own.
template <class Blocks, class Others>
FLASHJIT_FN Span hull_of_heads(const Listed<Blocks, Others>& mask, Span rows) {
  return hull_of_heads(mask.others, rows);
}
template <class Blocks, class Others>
FLASHJIT_FN Span key_gap(const Listed<Blocks, Others>& mask, Span rows) {
  return key_gap(mask.others, rows);
}

}  // namespace flashjit::device
