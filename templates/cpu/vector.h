// Operations on vectors for the CPU kernels, by Clang's vector extensions. instructions.h sets the vectors'
// length.
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
// The larger of a and b in one instruction, unlike fmax. A NaN in `a` gives b.
FLASHJIT_FN Vec larger(Vec a, Vec b) {
  return a > b ? a : b;
}

// 2^x for x <= 127; 0 below -127 and for -inf; NaN for NaN. The relative error of exp2 is 2e-7, of
// exp2_to_bf16 9e-5. The polynomials are minimax fits of relative error on [0, 1) whose constant is exactly
// 1. So 2^0 = 1, and rescaling by an unchanged maximum changes nothing.
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

// Natural logarithm of a positive normal number, NaN for NaN; relative error 2e-7. x is m * 2^e with m in
// [sqrt(1/2), sqrt(2)); the series of atanh gives log(m).
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

// load8 reads eight elements of a row as floats. store8 rounds floats to nearest even; overflow gives
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
  const Int8 bits = reinterpret_cast<Int8>(v), nearest = bits + 0x7fff + (bits >> 16 & 1);
  const Short8 rounded = __builtin_convertvector((v == v ? nearest : bits | 0x400000) >> 16, Short8);
  __builtin_memcpy(p, &rounded, sizeof rounded);
}

// Fetches a cache line into the second-level cache. Hardware does not foresee the next row of a tensor if
// rows lie apart. In the first-level cache, rows a power of two apart would share sets.
FLASHJIT_FN void fetch(const void* line) {
  __builtin_prefetch(line, 0, 2);
}
// For a loop over the columns of `rows` rows, `step` columns at a time. Each call fetches some cache lines of
// another `rows` rows, which begin at `next`.
template <int rows, int step, class Element>
FLASHJIT_FN void fetch_rows(int column, const Element* next, i64 stride) {
  constexpr int line = 64 / sizeof(Element), lines = rows * step / line;
#pragma unroll
  for (int i = 0; i < lines; ++i)
    fetch(next + (column % line / step * lines + i) * stride + column / line * line);
}

// One word of each of `lanes` rows in memory: the element of one column (fp32) or the elements of two
// columns.
template <class Element>
FLASHJIT_FN WordVec row_words(const Vec (&columns)[4 / sizeof(Element)]);
template <>
FLASHJIT_FN WordVec row_words<fp32>(const Vec (&columns)[1]) {
  return reinterpret_cast<WordVec>(columns[0]);
}
template <>
FLASHJIT_FN WordVec row_words<fp16>(const Vec (&columns)[2]) {
  using Halves = _Float16 __attribute__((vector_size(2 * lanes)));
  using Shorts = unsigned short __attribute__((vector_size(2 * lanes)));
  WordVec words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Halves rounded = __builtin_convertvector(columns[i], Halves);
    words[i] = __builtin_convertvector(reinterpret_cast<Shorts>(rounded), WordVec);
  }
  return words[0] | words[1] << 16;
}
template <>
FLASHJIT_FN WordVec row_words<bf16>(const Vec (&columns)[2]) {
  WordVec words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const WordVec bits = reinterpret_cast<WordVec>(columns[i]);
    const WordVec nearest = bits + 0x7fff + (bits >> 16 & 1), quiet_nan = bits | 0x400000;
    words[i] = columns[i] == columns[i] ? nearest : quiet_nan;
  }
  return upper_halves(words[0], words[1]);
}

// A quarter is four words of a vector. A vector has four quarters (AVX-512) or two (AVX2).
using Words4 = u32 __attribute__((vector_size(16)));
template <int count>
FLASHJIT_FN WordVec join(const Words4 (&w)[count]) {
  if constexpr (count == 2) {
    return __builtin_shufflevector(w[0], w[1], 0, 1, 2, 3, 4, 5, 6, 7);
  } else {
    const auto low = __builtin_shufflevector(w[0], w[1], 0, 1, 2, 3, 4, 5, 6, 7);
    const auto high = __builtin_shufflevector(w[2], w[3], 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
}
// low_words and high_words interleave the lower or the higher two words of a and b, in each quarter.
template <class V>
FLASHJIT_FN V low_words(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
  else
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
template <class V>
FLASHJIT_FN V high_words(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  else
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
// low_pairs and high_pairs put the lower or the higher half of b after the same half of a, in each quarter.
template <class V>
FLASHJIT_FN V low_pairs(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
  else
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
template <class V>
FLASHJIT_FN V high_pairs(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  else
    return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
// Quarter i is the four words at row(i). `row` must be always_inline: the compiler inlines nothing else.
template <class Row>
FLASHJIT_FN WordVec gather_words(Row row) {
  Words4 quarters[lanes / 4];
#pragma unroll
  for (int i = 0; i < lanes / 4; ++i) quarters[i] = load_unaligned<Words4>(row(i));
  return join(quarters);
}
// Transposes the 4 x 4 words of each quarter.
FLASHJIT_FN void transpose4(WordVec (&v)[4]) {
  const WordVec t[] = {low_words(v[0], v[1]), high_words(v[0], v[1]), low_words(v[2], v[3]),
                       high_words(v[2], v[3])};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    v[2 * i] = low_pairs(t[i], t[i + 2]);
    v[2 * i + 1] = high_pairs(t[i], t[i + 2]);
  }
}

}  // namespace flashjit::device
