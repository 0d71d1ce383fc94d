// Writes rows of a wgmma accumulator to memory. Four lanes hold a row. Lane `part` of the four holds columns
// 2 * part and 2 * part + 1 of every eight.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/scaled.cuh"

namespace flashjit::device {

// Transposes x among four lanes: x[i] of lane j and x[j] of lane i change places.
FLASHJIT_FN void transpose_quad(u32 (&x)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(0xffffffff, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 got = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + 2], 2);
    (upper ? x[i] : x[i + 2]) = got;
  }
}

// Writes the lane's columns of its first row (index 0) or of its second, times `factor`. The four lanes of a
// row write 32 contiguous bytes at a time. A factor of 0 gives zeros, also for NaN.
template <bool positive_zeros = false, int size>
FLASHJIT_FN void write_floats(float* to, const float (&accumulator)[size], int index, float factor,
                              int part) {
#pragma unroll
  for (int g = 0; g < size / 4; ++g) {
    const int at = 4 * g + 2 * index;
    *reinterpret_cast<float2*>(to + g * 8 + part * 2) =
        factor == 0 ? float2{0, 0}
                    : float2{scaled<positive_zeros>(accumulator[at], factor),
                             scaled<positive_zeros>(accumulator[at + 1], factor)};
  }
}

}  // namespace flashjit::device
