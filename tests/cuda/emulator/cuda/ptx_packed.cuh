// The part of templates/cuda/ptx_packed.cuh that the emulated kernels use, on the host.
#pragma once

#include "tests/cuda/emulator/cuda/ptx.cuh"

namespace flashjit::device {

template <class T>
u32 fma_rn_x2(T type, u32 a, u32 b, u32 c) {
  const auto element = [&](u32 shift) {
    const auto of = [&](u32 word) { return emulator::to_float(type, word >> shift & 0xffff); };
    return emulator::from_float(type, std::fma(of(a), of(b), of(c)));
  };
  return element(0) | element(16) << 16;
}
inline u32 prmt(u32 a, u32 b, u32 selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  u32 r = 0;
  for (u32 i = 0; i < 4; ++i) r |= static_cast<u32>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}
inline void cvt_rn_f16x2_e4m3x2(u32& low, u32& high, u32 word) {
  const auto element = [&](u32 shift) {
    const auto byte = static_cast<std::uint8_t>(word >> shift);
    return emulator::from_float(fp16{}, static_cast<float>(verify::load_element(&byte, DType::fp8_e4m3, 0)));
  };
  low = element(0) | element(8) << 16;
  high = element(16) | element(24) << 16;
}
inline void cvt_f32_f16x2(float& low, float& high, u32 halves) {
  low = emulator::to_float(fp16{}, halves & 0xffff);
  high = emulator::to_float(fp16{}, halves >> 16);
}
inline void cp_async_ca_4(u32 to, const void* from, int valid) {
  float value = 0;
  if (valid) std::memcpy(&value, from, 4);
  emulator::block().store(to, value);
}
inline float ld_shared(u32 from) {
  return emulator::block().load<float>(from);
}
inline void ld_shared_v2(float& a, float& b, u32 from) {
  a = emulator::block().load<float>(from);
  b = emulator::block().load<float>(from + 4);
}

}  // namespace flashjit::device
