// wgmma of 16 columns, whose operand A is in registers. Each wrapper is named after its instruction.
#pragma once

#include "cuda/ptx_sm90a.cuh"

namespace flashjit::device {

// d = a * b, or d += a * b. a and d must be left alone until a wait. b: rows of 16 elements, K-major.
template <bool accumulates>
FLASHJIT_FN void wgmma_m64n16k16(bf16, float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(accumulates)));
}
template <bool accumulates>
FLASHJIT_FN void wgmma_m64n16k16(fp16, float (&d)[8], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(accumulates)));
}
// After a wait: the compiler may not use results before it.
template <int count>
FLASHJIT_FN void wgmma_results(float (&d)[count]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

}  // namespace flashjit::device
