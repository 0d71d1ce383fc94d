// Wrappers of PTX instructions that add to floats in global memory. Each is named after its instruction.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

FLASHJIT_FN void red_add(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
// `to` is a multiple of 16 bytes.
#if __CUDA_ARCH__ >= 900
FLASHJIT_FN void red_add_v4(float* to, const float (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}
#endif

}  // namespace flashjit::device
