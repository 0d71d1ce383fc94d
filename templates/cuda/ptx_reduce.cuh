// Wrappers of PTX instructions that add to numbers in global memory. Each is named after its instruction.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

FLASHJIT_FN void red_add(float* to, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(value) : "memory");
}
FLASHJIT_FN void red_add(i64* to, i64 value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// Returns the number before the addition.
FLASHJIT_FN u32 atom_add(u32* to, u32 value) {
  u32 before;
  asm volatile("atom.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
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
