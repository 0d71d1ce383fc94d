// How the items of append_kv share a row's columns on a GPU.
#pragma once

#include "shared/rotary.h"

namespace flashjit::device {

// Heads whose pieces an item of K or Q has. They share the computation of their angles.
FLASHJIT_FN constexpr int heads_of_append_item(bool rotates) {
  return rotates ? 2 : 1;
}

// An item has two pieces of a row, of as many columns as 16 bytes hold, or fewer where halves of pairs would
// not lie alike. So one thread has both columns of a pair, and rotating in place is safe. Columns count from
// the first rotated one on, and after the last column of the row from its beginning; so the rotated ones come
// first. Both runs are whole pieces, since the first rotated column is a multiple of 8.
struct RowItems {
  int columns;      // of a piece
  int pairs_items;  // items whose pieces are the two halves of pairs, half style only
  int items;        // of a row
  int plain_begin;  // first column of the other items
  int plain_items;

  // `dim`: rotated columns, 0 for none. `bytes`: of an element.
  FLASHJIT_FN constexpr RowItems(RotaryStyle style, int dim, int head_dim, int bytes)
      : columns(16 / bytes), pairs_items(0), items(0), plain_begin(0), plain_items(0) {
    const bool halves = dim > 0 && style == RotaryStyle::half;
    const int alike = dim == 0 ? head_dim : halves ? dim / 2 : dim;
    while (alike % columns) columns /= 2;
    if (halves) {
      pairs_items = dim / 2 / columns;
      plain_begin = dim;
    }
    plain_items = ceil_div((head_dim - plain_begin) / columns, 2);
    items = pairs_items + plain_items;
  }

  // The first column of a piece; the second piece of the last item may lie beyond the row.
  FLASHJIT_FN constexpr int first(int item) const {
    return item < pairs_items ? item * columns : plain_begin + (item - pairs_items) * columns;
  }
  FLASHJIT_FN constexpr int second(int item) const {
    return item < pairs_items ? plain_begin / 2 + item * columns
                              : plain_begin + (item - pairs_items + plain_items) * columns;
  }
};

}  // namespace flashjit::device
