// The few operations that the CPU kernels are written in, on vectors of whatever length instructions.h gives
// them: Clang's vector extensions.
#pragma once

#include "cpu/instructions.h"

namespace flashjit::device {

using Vec8 = float __attribute__((vector_size(32)));  // eight elements of a row, whatever `lanes` is

FLASHJIT_FN Vec splat(float x) {
  return x - Vec{};
}
FLASHJIT_FN IntVec splat(int x) {
  return x - IntVec{};
}

// Scratch is aligned to whole vectors; tensors are not.
FLASHJIT_FN Vec load(const float* p) {
  return *reinterpret_cast<const Vec*>(p);
}
FLASHJIT_FN IntVec load(const int* p) {
  return *reinterpret_cast<const IntVec*>(p);
}
FLASHJIT_FN WordVec load(const u32* p) {
  return *reinterpret_cast<const WordVec*>(p);
}
FLASHJIT_FN void store(float* p, Vec v) {
  *reinterpret_cast<Vec*>(p) = v;
}
FLASHJIT_FN void store(bf16* p, WordVec v) {
  __builtin_memcpy(__builtin_assume_aligned(p, sizeof v), &v, sizeof v);
}

FLASHJIT_FN Vec fma(Vec a, Vec b, Vec c) {
  return __builtin_elementwise_fma(a, b, c);
}
FLASHJIT_FN Vec select(IntVec condition, Vec a, Vec b) {
  return condition ? a : b;
}
// One instruction, unlike fmax: a NaN in `a` gives b.
FLASHJIT_FN Vec larger(Vec a, Vec b) {
  return a > b ? a : b;
}

// 2^x for x <= 127, relative error 2e-7, of exp2_to_bf16 9e-5; 0 below -127, for -inf too; NaN for NaN. The
// polynomials are minimax fits of relative error on [0, 1) whose constant is 1 exactly: 2^0 = 1, so rescaling
// by an unchanged maximum changes nothing.
FLASHJIT_FN Vec exp2(Vec x) {
  x = representable(x);
  const Vec f = fraction(x);
  Vec p = splat(1.8671302e-3f);
  p = fma(p, f, splat(9.0170300e-3f));
  p = fma(p, f, splat(5.5799913e-2f));
  p = fma(p, f, splat(2.4016445e-1f));
  p = fma(p, f, splat(6.9315131e-1f));
  p = fma(p, f, splat(1.0f));
  return times_power(p, x);
}
FLASHJIT_FN Vec exp2_to_bf16(Vec x) {
  x = representable(x);
  const Vec f = fraction(x);
  Vec p = splat(7.7067042e-2f);
  p = fma(p, f, splat(2.2764499e-1f));
  p = fma(p, f, splat(6.9511679e-1f));
  p = fma(p, f, splat(1.0f));
  return times_power(p, x);
}

// Natural logarithm of a positive normal number, relative error 2e-7: m * 2^e with m in [sqrt(1/2), sqrt(2)),
// then the series of atanh. NaN gives NaN.
FLASHJIT_FN Vec log(Vec x) {
  const IntVec bits = reinterpret_cast<IntVec>(x);
  const IntVec e = (bits - 0x3f3504f3) >> 23;
  const Vec m = reinterpret_cast<Vec>(bits - (e << 23));
  const Vec z = (m - 1.0f) / (m + 1.0f);
  const Vec z2 = z * z;
  Vec series = splat(2.0f / 9);
  series = fma(series, z2, splat(2.0f / 7));
  series = fma(series, z2, splat(2.0f / 5));
  series = fma(series, z2, splat(2.0f / 3));
  series = fma(series, z2, splat(2.0f));
  return fma(__builtin_convertvector(e, Vec), splat(ln_2), z * series) + (x - x);
}

// Eight elements of any storage type, from and to a tensor's row; rounds to nearest even, overflows to
// infinity.
using Half8 = _Float16 __attribute__((vector_size(16)));
using Short8 = unsigned short __attribute__((vector_size(16)));
using Int8 = u32 __attribute__((vector_size(32)));

template <class T>
FLASHJIT_FN T load_unaligned(const void* p) {
  T v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
FLASHJIT_FN Vec8 load8(const fp32* p) {
  return load_unaligned<Vec8>(p);
}
FLASHJIT_FN Vec8 load8(const fp16* p) {
  return __builtin_convertvector(load_unaligned<Half8>(p), Vec8);
}
FLASHJIT_FN Vec8 load8(const bf16* p) {
  return reinterpret_cast<Vec8>(__builtin_convertvector(load_unaligned<Short8>(p), Int8) << 16);
}

FLASHJIT_FN void store8(fp32* p, Vec8 v) {
  __builtin_memcpy(p, &v, sizeof v);
}
FLASHJIT_FN void store8(fp16* p, Vec8 v) {
  const Half8 rounded = __builtin_convertvector(v, Half8);
  __builtin_memcpy(p, &rounded, sizeof rounded);
}
FLASHJIT_FN void store8(bf16* p, Vec8 v) {
  const Int8 bits = reinterpret_cast<Int8>(v);
  const Int8 nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Int8 quiet_nan = bits >> 16 | 0x40;
  const Short8 rounded = __builtin_convertvector(v == v ? nearest : quiet_nan, Short8);
  __builtin_memcpy(p, &rounded, sizeof rounded);
}

// Transposes 8 x 8.
FLASHJIT_FN void transpose8(Vec8 (&v)[8]) {
  Vec8 t[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  // t[0], t[1] hold columns {0, 1, 4, 5}, {2, 3, 6, 7} of rows 0, 1; t[2], t[3] those of rows 2, 3; ...
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    v[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    v[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    v[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    v[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  // v[c] holds columns c, c + 4 of rows 0..3; v[c + 4] those of rows 4..7.
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const Vec8 low = __builtin_shufflevector(v[c], v[c + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[c + 4] = __builtin_shufflevector(v[c], v[c + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    v[c] = low;
  }
}

}  // namespace flashjit::device
