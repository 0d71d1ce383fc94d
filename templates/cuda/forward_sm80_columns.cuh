// Heads of more than 256 columns, for the forward of the sm_80 family: two warps share their rows. Each
// computes the scores of half of a block's keys. They exchange the maxima of rows and the weights, and each
// multiplies all weights by every second pair of 8 columns of V.
#pragma once

#include "cuda/ptx_packed.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/tile.cuh"

namespace flashjit::device {

// Warps that share rows exchange these in shared memory: the weights of a block, and a number of each row
// from each warp.
template <int block_m, int block_n, int warp_rows, int groups>
class SharedRows {
  using Weights = SharedTile<block_m, block_n / 8>;
  static constexpr int m_tiles = warp_rows / 16;

 public:
  static constexpr int bytes = Weights::bytes + groups * block_m * 4;

  FLASHJIT_FN SharedRows(u32 shared, u32 thread)
      : shared_(shared), lane_(thread % 32), group_(thread / 32 % groups), of_rows_(thread / 32 / groups) {}

  // Replaces a value of each of the thread's rows by combine(it, another warp's).
  template <class Combine>
  FLASHJIT_FN void combine(float (&values)[2 * m_tiles], const Combine& combine) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r)
      if (lane_ % 4 == 0) st_shared(number(r, group_), __float_as_uint(values[r]));
    wait_for_all();
#pragma unroll
    for (int other = 1; other < groups; ++other)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r)
        values[r] = combine(values[r], ld_shared(number(r, (group_ + other) % groups)));
  }

  // Two weights of row r, of keys 8 * chunk + 2 (lane % 4) and the next one.
  FLASHJIT_FN void store(int r, u32 chunk, u32 weights) const {
    st_shared(shared_ + Weights::offset(row(r), chunk) + lane_ % 4 * 4, weights);
  }
  // The operand of 16 keys, the `step`-th ones of the block.
  FLASHJIT_FN void load(u32 (&operand)[m_tiles][4], int step) const {
    const u32 address = shared_ + of_rows_ * warp_rows * Weights::row_bytes + Weights::lane_offset(lane_);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(operand[i], Weights::at(address, i * 16, step * 2));
  }

  // Barrier 0 is that of all threads.
  FLASHJIT_FN void wait_for_all() const { bar_sync(static_cast<int>(1 + of_rows_), groups * 32); }

 private:
  FLASHJIT_FN u32 row(int r) const { return of_rows_ * warp_rows + static_cast<u32>(r) * 8 + lane_ / 4; }
  FLASHJIT_FN u32 number(int r, u32 group) const {
    return shared_ + Weights::bytes + (group * block_m + row(r)) * 4;
  }

  const u32 shared_, lane_, group_, of_rows_;
};

}  // namespace flashjit::device
