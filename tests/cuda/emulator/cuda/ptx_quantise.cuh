// templates/cuda/ptx_quantise.cuh on the host.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/kv_element.h"

namespace flashjit::device {

inline u32 cvt_rn_satfinite_x2(fp8_e4m3, float low, float high) {
  return verify::e4m3.bits(low) | u32{verify::e4m3.bits(high)} << 8;
}
inline u32 cvt_rn_satfinite_x2(fp8_e5m2, float low, float high) {
  return verify::e5m2.bits(low) | u32{verify::e5m2.bits(high)} << 8;
}
inline int cvt_rni(float x) {
  if (std::isnan(x)) return 0;
  return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(std::nearbyint(x));
}
inline u32 cvt_pack_sat_s8(int low, int high, u32 upper) {
  const auto saturated = [](int x) { return static_cast<u32>(std::clamp(x, -128, 127)) & 0xff; };
  return saturated(low) | saturated(high) << 8 | upper << 16;
}

}  // namespace flashjit::device
