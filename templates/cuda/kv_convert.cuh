// 8-bit keys and values on their way to products: words of four stored elements become operands. All int8,
// e4m3 and e5m2 numbers are exact in bf16 and fp16. Infinity stays infinite; NaN stays NaN, but may become
// 480 where there is no instruction for e4m3.
#pragma once

#include "cuda/ptx_packed.cuh"
#include "shared/kv_element.h"

namespace flashjit::device {

// The 16 bits in both halves of a word.
FLASHJIT_FN constexpr u32 twice(u32 bits) {
  return bits << 16 | bits;
}

template <class Element>
inline constexpr bool is_fp16 = false;
template <>
inline constexpr bool is_fp16<fp16> = true;

// To fp16 in two orders, to bf16 in one. parted: elements 0 and 2 of `word` become `even`, elements 1 and 3
// become `odd`. in_order: elements 0 and 1 become `low`, elements 2 and 3 become `high`.
template <class Element, class KvElement>
struct ConvertKeys;

constexpr u32 swap_middle_bytes = 0x3120;  // for prmt

// Sign and magnitude of a float in 8 bits, put into place in a float of 16 bits whose exponent has another
// bias. The product with a power of two sets the bias right, numbers without a leading one included. Bytes
// that lie in the right half of the word need no permutation.
template <int shift, class Element>
FLASHJIT_FN void rebias_fp8(u32 word, u32& even, u32& odd, Element, u32 factor) {
  constexpr u32 sign = twice(0x8000), magnitude = twice(0x7fu << shift);
  const u32 e = (word << shift & magnitude) | (word << 8 & sign);
  const u32 o = (word >> (8 - shift) & magnitude) | (word & sign);
  even = fma_rn_x2(Element{}, e, factor, sign);
  odd = fma_rn_x2(Element{}, o, factor, sign);
}

template <>
struct ConvertKeys<fp16, fp8_e4m3> {
#if __CUDA_ARCH__ >= 890
  static constexpr bool has_instruction = true;
#else
  static constexpr bool has_instruction = false;
#endif
  FLASHJIT_FN static void parted(u32 word, u32& even, u32& odd) {
    if constexpr (has_instruction)
      by_instruction(prmt(word, 0, swap_middle_bytes), even, odd);
    else
      by_shifts(word, even, odd);
  }
  FLASHJIT_FN static void in_order(u32 word, u32& low, u32& high) {
    if constexpr (has_instruction)
      by_instruction(word, low, high);
    else
      by_shifts(prmt(word, 0, swap_middle_bytes), low, high);
  }
  // In order.
  FLASHJIT_FN static void by_instruction(u32 word, u32& low, u32& high) {
    cvt_rn_f16x2_e4m3x2(low, high, word);
  }
  // Parted. NaN becomes 480.
  FLASHJIT_FN static void by_shifts(u32 word, u32& even, u32& odd) {
    rebias_fp8<7>(word, even, odd, fp16{}, twice((15 + 8) << 10));
  }
};
// The upper half of an fp16 number.
template <>
struct ConvertKeys<fp16, fp8_e5m2> {
  FLASHJIT_FN static void parted(u32 word, u32& even, u32& odd) {
    even = prmt(word, 0, 0x2404);
    odd = word & twice(0xff00);
  }
  FLASHJIT_FN static void in_order(u32 word, u32& low, u32& high) {
    low = prmt(word, 0, 0x1404);
    high = prmt(word, 0, 0x3424);
  }
};
// With its sign bit turned, a number plus 128 lies in the fraction of 1,024 + bits.
template <>
struct ConvertKeys<fp16, int8> {
  FLASHJIT_FN static void parted(u32 word, u32& even, u32& odd) { place(word, 0x4240, 0x4341, even, odd); }
  FLASHJIT_FN static void in_order(u32 word, u32& low, u32& high) { place(word, 0x4140, 0x4342, low, high); }

 private:
  FLASHJIT_FN static void place(u32 word, u32 first, u32 second, u32& a, u32& b) {
    const u32 positive = word ^ 0x80808080;
    constexpr u32 one = twice(0x3c00), minus_1152 = twice(0xe480);
    a = fma_rn_x2(fp16{}, prmt(positive, 0x64646464, first), one, minus_1152);
    b = fma_rn_x2(fp16{}, prmt(positive, 0x64646464, second), one, minus_1152);
  }
};

// A row of bf16 numbers as fp16, times a power of two.
class HalvedRow {
 public:
  // largest: the largest magnitude's bits. That number becomes at least 2^14 and less than 2^15, if the
  // factor is at most 2^126.
  FLASHJIT_FN explicit HalvedRow(u32 largest) : exponent_(min(max(largest >> 7, 15u), 254u)) {}
  FLASHJIT_FN u32 operator()(u32 word) const {
    const float factor = __uint_as_float((268 - exponent_) << 23);
    return cvt_rn_x2(fp16{}, __uint_as_float(word << 16) * factor,
                     __uint_as_float(word & 0xffff0000) * factor);
  }
  // 1 / the factor.
  FLASHJIT_FN float inverse() const { return __uint_as_float((exponent_ - 14) << 23); }

 private:
  u32 exponent_;
};
// The largest magnitude's bits of two bf16 numbers.
FLASHJIT_FN u32 largest_bits(u32 word) {
  return max(word & 0x7fff, word >> 16 & 0x7fff);
}

// Two fp16 numbers in another type, times `scale`.
template <class Element>
FLASHJIT_FN u32 scaled_halves(Element element, u32 halves, float scale) {
  float low, high;
  cvt_f32_f16x2(low, high, halves);
  return cvt_rn_x2(element, low * scale, high * scale);
}

template <class KvElement>
struct ConvertKeys<bf16, KvElement> {
  FLASHJIT_FN static void in_order(u32 word, u32& low, u32& high) {
    ConvertKeys<fp16, KvElement>::in_order(word, low, high);
    low = scaled_halves(bf16{}, low, 1);
    high = scaled_halves(bf16{}, high, 1);
  }
};
// The number's low seven bits lie in the fraction of 128 + bits. The sign bit lies in the exponent's lowest
// bit of 128 or 256, which is taken away.
template <>
struct ConvertKeys<bf16, int8> {
  FLASHJIT_FN static void in_order(u32 word, u32& low, u32& high) {
    low = of_low(prmt(word, 0, 0x4140));
    high = of_low(prmt(word, 0, 0x4342));
  }

 private:
  FLASHJIT_FN static u32 of_low(u32 word) {
    const u32 low = (word & twice(0x7f)) | twice(0x4300), minus_high = (word & twice(0x80)) | twice(0xc300);
    return fma_rn_x2(bf16{}, low, twice(0x3f80), minus_high);
  }
};

// 16 stored elements, in order.
template <class Element, class KvElement>
FLASHJIT_FN void convert_chunk(const u32 (&stored)[4], u32 (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) ConvertKeys<Element, KvElement>::in_order(stored[i], to[2 * i], to[2 * i + 1]);
}
// The same times `scale`, rounded.
template <class Element, class KvElement>
FLASHJIT_FN void convert_chunk(const u32 (&stored)[4], u32 (&to)[8], float scale) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 low, high;
    ConvertKeys<fp16, KvElement>::in_order(stored[i], low, high);
    to[2 * i] = scaled_halves(Element{}, low, scale);
    to[2 * i + 1] = scaled_halves(Element{}, high, scale);
  }
}

}  // namespace flashjit::device
