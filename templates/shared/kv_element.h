// Elements of 8-bit keys and values. Their true values are those stored times a scale (kv_scale_params.h).
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

using int8 = signed char;
// The Open Compute Project's 8-bit floats. e4m3: no infinity, NaN is 0x7f; bias 7. e5m2: as IEEE 754;
// bias 15.
struct fp8_e4m3 {
  unsigned char bits;
};
struct fp8_e5m2 {
  unsigned char bits;
};

template <class T>
inline constexpr bool is_quantised = false;
template <>
inline constexpr bool is_quantised<int8> = true;
template <>
inline constexpr bool is_quantised<fp8_e4m3> = true;
template <>
inline constexpr bool is_quantised<fp8_e5m2> = true;

// A byte of a key that holds its scales (ds_mla.h).
struct fp8_ds_mla;
template <class T>
inline constexpr bool is_ds_mla = false;
template <>
inline constexpr bool is_ds_mla<fp8_ds_mla> = true;

}  // namespace flashjit::device
