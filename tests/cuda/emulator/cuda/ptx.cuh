// The part of templates/cuda/ptx.cuh that the sm_90a kernels use, on the host.
#pragma once

#include "tests/cuda/emulator/emulator.hpp"

inline unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return flashjit::emulator::block().all_lanes(value)[threadIdx.x % 32 ^ static_cast<unsigned>(mask)];
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return flashjit::emulator::block().all_lanes(value)[lane % 32];
}
inline bool __any_sync(unsigned, bool mine) {
  bool any = false;
  for (const bool one : flashjit::emulator::block().all_lanes(mine)) any |= one;
  return any;
}
inline void __syncwarp() {
  flashjit::emulator::block().warp_sync();
}
inline void __syncthreads() {
  flashjit::emulator::block().named_sync(0, flashjit::emulator::block().threads());
}

namespace flashjit::device {

inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const char*>(pointer) - dynamic_shared);
}
inline void ldmatrix_x4(u32 (&r)[4], u32 from) {
  const auto rows = emulator::block().all_lanes(from);
  const u32 lane = threadIdx.x % 32;
  for (u32 j = 0; j < 4; ++j) r[j] = emulator::block().load<u32>(rows[8 * j + lane / 4] + lane % 4 * 4);
}
template <class T>
u32 cvt_rn_x2(T type, float low, float high) {
  return emulator::from_float(type, low) | emulator::from_float(type, high) << 16;
}
inline float ex2_approx(float x) {
  return std::exp2(x);
}
inline float lg2_approx(float x) {
  return std::log2(x);
}
inline void st_shared(u32 to, u32 value) {
  emulator::block().store(to, value);
}
inline void st_shared_v2(u32 to, u32 a, u32 b) {
  emulator::block().store(to, std::array{a, b});
}
inline void st_shared_v4(u32 to, u32 a, u32 b, u32 c, u32 d) {
  emulator::block().store(to, uint4{a, b, c, d});
}
inline void ld_shared_v2(int& a, int& b, u32 from) {
  a = emulator::block().load<int>(from);
  b = emulator::block().load<int>(from + 4);
}
inline void ld_shared_v4(u32 (&r)[4], u32 from) {
  for (u32 i = 0; i < 4; ++i) r[i] = emulator::block().load<u32>(from + 4 * i);
}

}  // namespace flashjit::device
