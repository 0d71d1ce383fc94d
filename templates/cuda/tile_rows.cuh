// Which query rows a tile holds.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// Of one head.
template <int block_m, bool packed>
struct TileRows {
  static constexpr int heads = 1, tokens = block_m;
  FLASHJIT_FN explicit TileRows(const ForwardParams&) {}

  // Of rows r + i, where the tile's first is at `begin` of its sequence.
  struct Positions {
    int first;
    FLASHJIT_FN int operator()(int i) const { return first + i; }
  };
  FLASHJIT_FN Positions positions(int begin, int r) const { return {begin + r}; }
};

// Of the query heads that share a key/value head: all heads of a token, then the next token's. Where their
// number does not divide block_m, the last rows are nobody's.
template <int block_m>
struct TileRows<block_m, true> {
  int heads, tokens;
  FLASHJIT_FN explicit TileRows(const ForwardParams& p)
      : heads(p.packed_heads), tokens(block_m / p.packed_heads) {}
  FLASHJIT_FN int used() const { return tokens * heads; }

  struct Positions {
    int begin, r, heads;
    FLASHJIT_FN int operator()(int i) const { return begin + (r + i) / heads; }
  };
  FLASHJIT_FN Positions positions(int begin, int r) const { return {begin, r, heads}; }
  // Elements from row 0 to row r.
  FLASHJIT_FN i64 offset(const TensorView& t, int r) const {
    return r / heads * t.row_stride + r % heads * t.head_stride;
  }
};

}  // namespace flashjit::device
