// Writes rows of gradients from an accumulator. Four lanes hold a row.
#pragma once

#include "cuda/accumulator_row.cuh"

namespace flashjit::device {

// Writes the lane's columns of its first row (index 0) or of its second, times `factor`, to `to` if `inside`.
// A factor of 0 gives zeros, also for NaN. All lanes of the warp take part.
template <bool positive_zeros, class Gradient, int size>
FLASHJIT_FN void write_gradient(Gradient* to, const float (&accumulator)[size], int index, float factor,
                                bool inside, int part) {
  if constexpr (sizeof(Gradient) == 4) {
    if (inside) write_floats<positive_zeros>(to, accumulator, index, factor, part);
  } else {
    // Each lane collects one of four chunks of 8 columns.
    constexpr int chunks = size / 4;
#pragma unroll
    for (int g = 0; g < chunks; g += 4) {
      u32 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * min(g + i, chunks - 1) + 2 * index;
        x[i] = cvt_rn_x2(Gradient{}, scaled<positive_zeros>(accumulator[at], factor),
                         scaled<positive_zeros>(accumulator[at + 1], factor));
        if (factor == 0) x[i] = 0;
      }
      transpose_quad(x, part);
      if (inside && g + part < chunks) st_global_v4(to + (g + part) * 8, x);
    }
  }
}

}  // namespace flashjit::device
