// The part of templates/cuda/ptx.cuh that the emulated kernels use, on the host.
#pragma once

#include "tests/cuda/emulator/emulator.hpp"

inline unsigned __float_as_uint(float x) {
  return __builtin_bit_cast(unsigned, x);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  return flashjit::emulator::block().all_lanes(value, lanes)[threadIdx.x % 32 ^ static_cast<unsigned>(mask)];
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned lane) {
  return flashjit::emulator::block().all_lanes(value)[lane % 32];
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  unsigned bits = 0, lane = 0;
  for (const bool one : flashjit::emulator::block().all_lanes(mine)) bits |= unsigned{one} << lane++;
  return bits;
}
inline int __ffs(int bits) {
  return __builtin_ffs(bits);
}
inline int __clz(int bits) {
  return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32;
}
inline int __popc(unsigned bits) {
  return __builtin_popcount(bits);
}
inline float __int_as_float(int x) {
  return __builtin_bit_cast(float, x);
}
inline float __uint_as_float(unsigned x) {
  return __builtin_bit_cast(float, x);
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

inline u32 tid_x() {
  return threadIdx.x;
}
inline u32 ctaid_x() {
  return blockIdx.x;
}
inline u32 ctaid_y() {
  return blockIdx.y;
}
inline u32 ctaid_z() {
  return blockIdx.z;
}
inline u32 nctaid_x() {
  return gridDim.x;
}
inline u32 nctaid_y() {
  return gridDim.y;
}
inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const char*>(pointer) - dynamic_shared);
}
inline void ldmatrix(u32* r, u32 count, u32 from) {
  const auto rows = emulator::block().all_lanes(from);
  const u32 lane = threadIdx.x % 32;
  for (u32 j = 0; j < count; ++j) r[j] = emulator::block().load<u32>(rows[8 * j + lane / 4] + lane % 4 * 4);
}
inline void ldmatrix_x4(u32 (&r)[4], u32 from) {
  ldmatrix(r, 4, from);
}
inline void ldmatrix_x2(u32& r0, u32& r1, u32 from) {
  u32 r[2];
  ldmatrix(r, 2, from);
  r0 = r[0];
  r1 = r[1];
}
// Lane l holds rows 2 (l % 4) and the next one of column l / 4.
inline void ldmatrix_trans(u32* r, u32 count, u32 from) {
  const auto rows = emulator::block().all_lanes(from);
  const u32 lane = threadIdx.x % 32;
  for (u32 j = 0; j < count; ++j) {
    const auto element = [&](u32 row) {
      return u32{emulator::block().load<std::uint16_t>(rows[8 * j + row] + lane / 4 * 2)};
    };
    r[j] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
  }
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 from) {
  ldmatrix_trans(r, 4, from);
}
inline void ldmatrix_x2_trans(u32& r0, u32& r1, u32 from) {
  u32 r[2];
  ldmatrix_trans(r, 2, from);
  r0 = r[0];
  r1 = r[1];
}
template <class T>
void mma_m16n8k16(T type, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto lanes_a = emulator::block().all_lanes(std::array{a[0], a[1], a[2], a[3]});
  const auto lanes_b = emulator::block().all_lanes(std::array{b0, b1});
  emulator::Operand rows[2];
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k)
      rows[r][k] = emulator::to_float(
          type, lanes_a[threadIdx.x % 32 / 4 * 4 + k % 8 / 2][k / 8 * 2 + r] >> k % 2 * 16 & 0xffff);
  const auto b = [&](int k, int n) {
    const auto uk = static_cast<u32>(k), un = static_cast<u32>(n);
    return emulator::to_float(type, lanes_b[un * 4 + uk % 8 / 2][uk / 8] >> uk % 2 * 16 & 0xffff);
  };
  emulator::multiply<8>(d, rows, b, 1);
}

inline void cp_async_cg(u32 to, const void* from, int valid) {
  std::array<char, 16> bytes{};
  std::memcpy(bytes.data(), from, static_cast<std::size_t>(valid));
  emulator::block().store(to, bytes);
}
inline void cp_async_cg(u32 to, const void* from, int valid, u64) {
  cp_async_cg(to, from, valid);
}
inline u64 l2_evict_first() {
  return 0;
}
inline u64 l2_evict_normal() {
  return 0;
}
inline void cp_async_commit_group() {}
template <int pending>
void cp_async_wait_group() {}

template <class T>
u32 cvt_rn_x2(T type, float low, float high) {
  return emulator::from_float(type, low) | emulator::from_float(type, high) << 16;
}
inline float ex2_approx(float x) {
  return std::exp2(x);
}
inline float to_float(bf16 x) {
  return emulator::to_float(x, x.bits);
}
inline float to_float(fp16 x) {
  return emulator::to_float(x, x.bits);
}
inline float rcp_approx(float x) {
  return 1 / x;
}
inline float lg2_approx(float x) {
  return std::log2(x);
}
inline void ld_global_cg_v4(u32 (&r)[4], const void* from) {
  std::memcpy(r, from, sizeof r);
}
inline void ld_global_cg_v2(u32 (&r)[2], const void* from) {
  std::memcpy(r, from, sizeof r);
}
inline float ld_global_cg(const float* from) {
  return *from;
}
inline void ld_global_nc_v4(u32 (&r)[4], const void* from) {
  std::memcpy(r, from, sizeof r);
}
inline float ld_global_nc(const float* from) {
  return *from;
}
inline void st_global(void* to, u32 value) {
  std::memcpy(to, &value, sizeof value);
}
inline void st_global_v2(void* to, const u32 (&r)[2]) {
  std::memcpy(to, r, sizeof r);
}
inline void st_global_v4(void* to, const u32 (&r)[4]) {
  std::memcpy(to, r, sizeof r);
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
