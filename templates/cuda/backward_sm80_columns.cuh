// Heads of more than 64 columns, for the backward of the sm_80 family: two warps share their keys, or four
// with more than 256 columns. Each makes the scores of its part of a block's rows. They exchange weights and
// dS, and each multiplies all of them by its part of the columns of dO and Q.
#pragma once

#include "cuda/tile.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

// A warp's part of a block's keys, rows and columns, and how scores go through shared memory.
template <class Spec, class Config>
struct SharedKeys {
  static constexpr int parts = backward_column_parts(Spec::head_dim, Spec::head_dim_v);
  static constexpr int warp_keys = Config::block_n * parts / Config::num_warps, m_tiles = warp_keys / 16;
  static constexpr int warp_rows = Config::block_m / parts, q_tiles = warp_rows / 8;
  static_assert(warp_keys % 16 == 0 && warp_rows % 16 == 0);
  // 8-column tiles of dK and dV.
  FLASHJIT_FN static constexpr int tiles_of(int head_dim) {
    return parts == 1 ? head_dim / 8 : round_up(ceil_div(head_dim / 8, parts), 2);
  }
  static constexpr int k_tiles = tiles_of(Spec::head_dim), v_tiles = tiles_of(Spec::head_dim_v);
  using DsTile = SharedTile<Config::block_n, Config::block_m / 8>;

  // Stores 16 columns of scores, from the warp's 8 * n-th row on. warp: among those that share no keys; part:
  // among those that share its keys. With copies of these numbers the machine code would be another one.
  FLASHJIT_FN static void store_scores(u32 tile, const u32 (&a)[m_tiles][4], int n, const u32& lane,
                                       const u32& warp, const u32& part) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        st_shared(tile +
                      DsTile::offset(warp * warp_keys + i * 16 + j % 2 * 8 + lane / 4,
                                     part * warp_rows / 8 + n + j / 2) +
                      lane % 4 * 4,
                  a[i][j]);
  }
  // Loads the operand of the t-th 16 rows; `rows` is a lane's address.
  FLASHJIT_FN static void load_scores(u32 (&a)[m_tiles][4], u32 rows, int t) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(a[i], DsTile::at(rows, i * 16, t * 2));
  }
};

}  // namespace flashjit::device
