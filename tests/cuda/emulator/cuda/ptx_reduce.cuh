// templates/cuda/ptx_reduce.cuh on the host. Blocks run one after the other.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

inline void red_add(float* to, float value) {
  *to += value;
}

}  // namespace flashjit::device
