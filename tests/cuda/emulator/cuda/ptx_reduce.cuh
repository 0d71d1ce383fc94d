// templates/cuda/ptx_reduce.cuh on the host. Blocks run one after the other.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

inline void red_add(float* to, float value) {
  *to += value;
}
inline u32 atom_add(u32* to, u32 value) {
  const u32 before = *to;
  *to += value;
  return before;
}
inline void red_add_v4(float* to, const float (&v)[4]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16) throw std::runtime_error("a reduction of no multiple of 16");
  for (int i = 0; i < 4; ++i) to[i] += v[i];
}

inline void red_add(i64* to, i64 value) {
  *to += value;
}

}  // namespace flashjit::device
