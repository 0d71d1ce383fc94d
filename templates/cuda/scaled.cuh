// Results on their way from an accumulator to memory.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// positive_zeros: 0 also where a block that a row or key has no part in may have made 0 of -0.
template <bool positive_zeros>
FLASHJIT_FN float scaled(float sum, float factor) {
  return positive_zeros ? __fmaf_rn(sum, factor, 0.f) : sum * factor;
}

}  // namespace flashjit::device
