// Products of a warp by mma.sync. Operands come from SharedTiles or from accumulators of a product before.
// Accumulator tiles have 16 rows and 8 columns; addresses are those that SharedTile's lane offsets give.
#pragma once

#include "cuda/scaled.cuh"
#include "cuda/tile.cuh"

namespace flashjit::device {

template <int m_tiles, int n_tiles>
FLASHJIT_FN void clear(float (&d)[m_tiles][n_tiles][4]) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i)
#pragma unroll
    for (int n = 0; n < n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][n][e] = 0;
}

// d = a b^T over 16 * steps columns of both. a: from lane_offset(), b: from lane_offset_b().
template <class Element, class ATile, class BTile, int steps, int m_tiles, int n_tiles>
FLASHJIT_FN void multiply_rows(float (&d)[m_tiles][n_tiles][4], u32 a_address, u32 b_address) {
  static_assert(n_tiles % 2 == 0);
  clear(d);
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    u32 a[m_tiles][4];
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(a[i], ATile::at(a_address, i * 16, step * 2));
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      u32 b[4];
      ldmatrix_x4(b, BTile::at(b_address, n * 8, step * 2));
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        mma_m16n8k16(Element{}, d[i][n], a[i], b[0], b[1]);
        mma_m16n8k16(Element{}, d[i][n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Two accumulator tiles of 8 columns are, element for element, one operand of 16.
template <class Element, int m_tiles, int n_tiles>
FLASHJIT_FN void to_operand(u32 (&a)[m_tiles][4], const float (&d)[m_tiles][n_tiles][4], int n) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      a[i][j] = cvt_rn_x2(Element{}, d[i][n + j / 2][j % 2 * 2], d[i][n + j / 2][j % 2 * 2 + 1]);
}

// d += a b, with 16 rows of b from `row` on, and its columns from 8 * first_chunk on, an even number. b: from
// lane_offset().
template <class Element, class BTile, int m_tiles, int n_tiles>
FLASHJIT_FN void add_product(float (&d)[m_tiles][n_tiles][4], const u32 (&a)[m_tiles][4], u32 b_address,
                             int row, u32 first_chunk = 0) {
#pragma unroll
  for (int n = 0; n < n_tiles; n += 2) {
    u32 b[4];
    if (n + 1 < n_tiles)
      ldmatrix_x4_trans(b, BTile::at(b_address, row, first_chunk + n));
    else
      ldmatrix_x2_trans(b[0], b[1], BTile::at(b_address, row, first_chunk + n));
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      mma_m16n8k16(Element{}, d[i][n], a[i], b[0], b[1]);
      if (n + 1 < n_tiles) mma_m16n8k16(Element{}, d[i][n + 1], a[i], b[2], b[3]);
    }
  }
}

// Writes a warp's rows of d, times `factor`, as elements: 8-column chunks [first_chunk, chunks) of them, as
// many as d has. 16-bit elements go through the warp's rows of a SharedTile. row_pointer(row) is the row's
// first element in memory, or null if the row is nobody's.
template <bool positive_zeros, class Out, class Tile, int m_tiles, int n_tiles, class RowPointer>
FLASHJIT_FN void store_rows(const float (&d)[m_tiles][n_tiles][4], float factor, u32 tile, u32 first_row,
                            u32 lane, const RowPointer& row_pointer, u32 first_chunk, u32 chunks) {
#pragma unroll
  for (int i = 0; i < m_tiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 row = first_row + i * 16 + half * 8 + lane / 4;
      [[maybe_unused]] Out* const to = row_pointer(row);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        const u32 chunk = first_chunk + n;
        const float low = scaled<positive_zeros>(d[i][n][half * 2], factor),
                    high = scaled<positive_zeros>(d[i][n][half * 2 + 1], factor);
        if (chunk >= chunks) break;
        if constexpr (sizeof(Out) == 4) {
          const u32 words[2] = {__float_as_uint(low), __float_as_uint(high)};
          if (to) st_global_v2(to + chunk * 8 + lane % 4 * 2, words);
        } else {
          st_shared(tile + Tile::offset(row, chunk) + lane % 4 * 4, cvt_rn_x2(Out{}, low, high));
        }
      }
    }
  if constexpr (sizeof(Out) == 4) return;
  __syncwarp();
#pragma unroll 4
  for (u32 index = lane; index < m_tiles * 16 * n_tiles; index += 32) {
    const u32 row = first_row + index / n_tiles, chunk = first_chunk + index % n_tiles;
    Out* const to = row_pointer(row);
    if (chunk >= chunks || !to) continue;
    u32 words[4];
    ld_shared_v4(words, tile + Tile::offset(row, chunk));
    st_global_v4(to + chunk * 8, words);
  }
}

}  // namespace flashjit::device
