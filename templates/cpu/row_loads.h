// Rows of Q, K and V, of every dtype, as vectors of floats; sums of such vectors.
#pragma once

#include "cpu/vector.h"
#include "shared/kv_element.h"

namespace flashjit::device {

// Vectors that one load of a row of Q, K or V makes. A word of memory holds two columns of bf16: the first
// vector gets the even columns, the second the odd ones.
template <class Element>
inline constexpr int vectors_of_load = __is_same(Element, bf16) ? 2 : 1;

// `count` stored 8-bit elements as floats, without their scale.
template <int count>
using Bytes = unsigned char __attribute__((vector_size(count)));
template <int count>
using Floats = float __attribute__((vector_size(4 * count)));
template <int count>
FLASHJIT_FN Floats<count> load_floats(const int8* p) {
  using Int8s = signed char __attribute__((vector_size(count)));
  return __builtin_convertvector(load_unaligned<Int8s>(p), Floats<count>);
}
// By fp16, whose exponents span those of both formats: conversion heeds no DenormalsAreZeros.
template <int count>
FLASHJIT_FN Floats<count> halves_to_floats(unsigned short __attribute__((vector_size(2 * count))) bits) {
  using Halves = _Float16 __attribute__((vector_size(2 * count)));
  return __builtin_convertvector(reinterpret_cast<Halves>(bits), Floats<count>);
}
template <int count>
FLASHJIT_FN Floats<count> load_floats(const fp8_e5m2* p) {
  using Shorts = unsigned short __attribute__((vector_size(2 * count)));
  return halves_to_floats<count>(__builtin_convertvector(load_unaligned<Bytes<count>>(p), Shorts) << 8);
}
template <int count>
FLASHJIT_FN Floats<count> load_floats(const fp8_e4m3* p) {
  using Shorts = unsigned short __attribute__((vector_size(2 * count)));
  const Shorts bytes = __builtin_convertvector(load_unaligned<Bytes<count>>(p), Shorts),
               magnitude = bytes & 0x7f;
  const Shorts nan = reinterpret_cast<Shorts>(magnitude == 0x7f) & 0x7e00;
  // fp16's bias is larger by 8.
  return halves_to_floats<count>((bytes & 0x80) << 8 | magnitude << 7 | nan) * 256.0f;
}
template <class Element>
FLASHJIT_FN Vec8 load8(const Element* p) {
  return load_floats<8>(p);
}

// Loads columns from `c` on. Columns from `columns` on, a multiple of 8, are zeros.
FLASHJIT_FN Vec load_vector(const fp32* p) {
  return load_unaligned<Vec>(p);
}
FLASHJIT_FN Vec load_vector(const fp16* p) {
  using Halves = _Float16 __attribute__((vector_size(2 * lanes)));
  return __builtin_convertvector(load_unaligned<Halves>(p), Vec);
}
template <class Element>
FLASHJIT_FN Vec load_vector(const Element* p) {
  return load_floats<lanes>(p);
}
template <int columns, class Element>
FLASHJIT_FN void load_columns(const Element* row, int c, Vec (&to)[1]) {
  if constexpr (lanes == 8 || columns % lanes == 0) {
    to[0] = load_vector(row + c);
  } else {
    if (c + lanes <= columns) {
      to[0] = load_vector(row + c);
    } else {
      to[0] = __builtin_shufflevector(load8(row + c), Vec8{}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                      14, 15);
    }
  }
}
template <int columns>
FLASHJIT_FN void load_columns(const bf16* row, int c, Vec (&to)[2]) {
  WordVec words;
  if (c + 2 * lanes <= columns) {
    words = load_unaligned<WordVec>(row + c);
  } else {
    Words4 quarters[lanes / 4] = {};
#pragma unroll
    for (int i = 0; i < lanes / 4; ++i)
      if (c + 8 * i < columns) quarters[i] = load_unaligned<Words4>(row + c + 8 * i);
    words = join(quarters);
  }
  to[0] = reinterpret_cast<Vec>(words << 16);
  to[1] = reinterpret_cast<Vec>(words & 0xffff0000u);
}
// Interleave the lower or the higher halves of a and b.
template <class V>
FLASHJIT_FN V interleave_low(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  else
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V>
FLASHJIT_FN V interleave_high(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  else
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
// Puts the columns of a load in order, at `p`.
template <class Element>
FLASHJIT_FN void order_columns(float* p) {
  if constexpr (vectors_of_load<Element> == 2) {
    const Vec even = load(p), odd = load(p + lanes);
    store(p, interleave_low(even, odd));
    store(p + lanes, interleave_high(even, odd));
  }
}

// Adds the two quarters of each half: the results of a, then those of b.
template <class V>
FLASHJIT_FN V pair_sums(V a, V b) {
  if constexpr (sizeof(V) == 32)
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  else
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
template <class V>
FLASHJIT_FN float sum_of(V v) {
  if constexpr (sizeof(V) == 64) {
    return sum_of(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  } else {
    const auto quarter =
        __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    return quarter[0] + quarter[2] + (quarter[1] + quarter[3]);
  }
}
// Element i is the sum of v[i].
FLASHJIT_FN Vec sums_of(const Vec (&v)[lanes]) {
  Vec quarters[lanes / 4];  // of four vectors: their sums of each quarter
#pragma unroll
  for (int i = 0; i < lanes / 4; ++i) {
    const Vec a = low_words(v[4 * i], v[4 * i + 1]) + high_words(v[4 * i], v[4 * i + 1]);
    const Vec b = low_words(v[4 * i + 2], v[4 * i + 3]) + high_words(v[4 * i + 2], v[4 * i + 3]);
    quarters[i] = low_pairs(a, b) + high_pairs(a, b);
  }
  const Vec halves = pair_sums(quarters[0], quarters[1]);
  if constexpr (lanes == 8) {
    return halves;
  } else {
    return pair_sums(halves, pair_sums(quarters[2], quarters[3]));
  }
}

}  // namespace flashjit::device
