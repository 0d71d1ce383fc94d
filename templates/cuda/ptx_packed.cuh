// Wrappers of PTX instructions on packed elements and of small copies, which only kernels with 8-bit keys and
// values need. Each is named after its instruction.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// a * b + c for two elements.
FLASHJIT_FN u32 fma_rn_x2(bf16, u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
FLASHJIT_FN u32 fma_rn_x2(fp16, u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Byte i of the result is that byte of b:a which the i-th digit of `selector` names.
FLASHJIT_FN u32 prmt(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// For the two halves of `word`, from sm_89 on. A shift for the upper half would be an instruction more.
FLASHJIT_FN void cvt_rn_f16x2_e4m3x2(u32& low, u32& high, u32 word) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}
FLASHJIT_FN void cvt_f32_f16x2(float& low, float& high, u32 halves) {
  asm("{\n"
      ".reg .b16 l, h;\n"
      "mov.b32 {l, h}, %2;\n"
      "cvt.f32.f16 %0, l;\n"
      "cvt.f32.f16 %1, h;\n"
      "}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
}

// Copies 4 bytes to shared memory. The first `valid` bytes (0 or 4) are read, the others are zeros.
FLASHJIT_FN void cp_async_ca_4(u32 to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
FLASHJIT_FN float ld_shared(u32 from) {
  float a;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(a) : "r"(from) : "memory");
  return a;
}
FLASHJIT_FN void ld_shared_v2(float& a, float& b, u32 from) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}

}  // namespace flashjit::device
