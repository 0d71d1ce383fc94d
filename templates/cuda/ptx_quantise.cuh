// Wrappers of PTX instructions that round floats to 8 bits. Each is named after its instruction.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/kv_element.h"

namespace flashjit::device {

// Two elements in the lower half of a register, `low` in its low byte. Beyond the largest value: the largest
// value. From sm_89 on.
FLASHJIT_FN u32 cvt_rn_satfinite_x2(fp8_e4m3, float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
FLASHJIT_FN u32 cvt_rn_satfinite_x2(fp8_e5m2, float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
// NaN becomes 0.
FLASHJIT_FN int cvt_rni(float x) {
  int r;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}
// Bytes 0 and 1: `low` and `high`, saturated. Bytes 2 and 3: bytes 0 and 1 of `upper`.
FLASHJIT_FN u32 cvt_pack_sat_s8(int low, int high, u32 upper) {
  u32 r;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(high), "r"(low), "r"(upper));
  return r;
}

}  // namespace flashjit::device
