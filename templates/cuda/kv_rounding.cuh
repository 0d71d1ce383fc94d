// Rounds floats to the 8-bit elements of caches: to nearest even, saturating. NaN becomes NaN, of int8 0.
#pragma once

#include "cuda/ptx_quantise.cuh"
#include "shared/append_quantised.h"

namespace flashjit::device {

// The bits of an 8-bit float, in arithmetic that every GPU has.
template <class KvElement>
FLASHJIT_FN u32 round_to_fp8(float x) {
  using Format = KvFormat<KvElement>;
  constexpr int dropped = 23 - Format::mantissa_bits;
  const float size = fminf(fabsf(x), Format::largest);
  const u32 bits = __float_as_uint(size);
  const u32 normal = ((bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1)) >> dropped) -
                     ((127 - Format::bias) << Format::mantissa_bits);
  const u32 subnormal = __float_as_uint(size + Format::aligner) - __float_as_uint(Format::aligner);
  const u32 rounded = size < Format::least_normal ? subnormal : normal;
  return (x == x ? rounded : 0x7fu) | (__float_as_uint(x) >> 24 & 0x80u);
}

// Two elements in the lower half of a register.
template <class KvElement>
FLASHJIT_FN u32 round_x2(KvElement element, float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return round_to_fp8<KvElement>(low) | round_to_fp8<KvElement>(high) << 8;
#else
  return cvt_rn_satfinite_x2(element, low, high);
#endif
}
FLASHJIT_FN u32 round_x2(int8, float low, float high) {
  return cvt_pack_sat_s8(cvt_rni(low), cvt_rni(high), 0);
}
template <class KvElement>
FLASHJIT_FN u32 round_x4(KvElement element, const float* x) {
  return round_x2(element, x[0], x[1]) | round_x2(element, x[2], x[3]) << 16;
}
FLASHJIT_FN u32 round_x4(int8, const float* x) {
  return cvt_pack_sat_s8(cvt_rni(x[0]), cvt_rni(x[1]), cvt_pack_sat_s8(cvt_rni(x[2]), cvt_rni(x[3]), 0));
}

// `to` is aligned to as many bytes.
template <class KvElement, int columns>
FLASHJIT_FN void store_rounded(KvElement* to, const float (&x)[columns]) {
  static_assert(columns == 1 || columns == 2 || columns == 4 || columns == 8);
  if constexpr (columns == 8) {
    const u32 words[] = {round_x4(KvElement{}, x), round_x4(KvElement{}, x + 4)};
    st_global_v2(to, words);
  } else if constexpr (columns == 4) {
    st_global(to, round_x4(KvElement{}, x));
  } else if constexpr (columns == 2) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(round_x2(KvElement{}, x[0], x[1]));
  } else {
    *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(round_x2(KvElement{}, x[0], 0));
  }
}

}  // namespace flashjit::device
