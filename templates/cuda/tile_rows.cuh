// The query rows of a tile.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// Rows of one head.
template <int block_m, bool packed>
struct TileRows {
  static constexpr int heads = 1, tokens = block_m;
  template <class Params>
  FLASHJIT_FN explicit TileRows(const Params&) {}

  // Positions of rows r + i, for i = 0 and i = 8. `begin` is the position of the tile's first row.
  struct Positions {
    int first;
    FLASHJIT_FN int operator()(int i) const { return first + i; }
  };
  FLASHJIT_FN Positions positions(int begin, int r) const { return {begin + r}; }
  // The head of row r, counted from the tile's first head.
  FLASHJIT_FN int head(int) const { return 0; }
};

// Rows of query heads that share a key/value head: all heads of a token, then all heads of the next token. If
// the number of heads does not divide block_m, the last rows are unused.
template <int block_m>
struct TileRows<block_m, true> {
  int heads, tokens;
  u32 inverse;
  template <class Params>
  FLASHJIT_FN explicit TileRows(const Params& p)
      : heads(p.packed_heads),
        tokens(quotient(block_m, p.packed_heads_inverse)),
        inverse(p.packed_heads_inverse) {}
  FLASHJIT_FN int used() const { return tokens * heads; }

  struct Positions {
    int row_0, row_8;
    FLASHJIT_FN int operator()(int i) const { return i == 0 ? row_0 : row_8; }
  };
  FLASHJIT_FN Positions positions(int begin, int r) const {
    return {begin + quotient(r, inverse), begin + quotient(r + 8, inverse)};
  }
  FLASHJIT_FN int head(int r) const { return r - quotient(r, inverse) * heads; }
  // Elements from row 0 to row r.
  FLASHJIT_FN i64 offset(const TensorView& t, int r) const {
    return quotient(r, inverse) * t.row_stride + head(r) * t.head_stride;
  }

 private:
  // r / heads, without the registers that a division takes.
  static FLASHJIT_FN int quotient(u32 r, u32 inverse) { return static_cast<int>(r * inverse >> 16); }
};

}  // namespace flashjit::device
