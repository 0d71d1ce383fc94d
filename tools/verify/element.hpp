// Reads and writes tensor elements in host memory. Software does the conversions: reading is exact, writing
// rounds to nearest even. What exceeds an 8-bit format becomes its largest value, as GPUs' conversions do.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codegen/spec/dtype.hpp"

namespace flashjit::verify {

inline float bf16_to_float(std::uint16_t h) {
  return std::bit_cast<float>(std::uint32_t{h} << 16);
}

inline std::uint16_t float_to_bf16(float f) {
  const auto x = std::bit_cast<std::uint32_t>(f);
  if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((x >> 16) | 0x40u);  // a quiet NaN
  return static_cast<std::uint16_t>((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Read as a float, the half's bits give a number that is 2^112 times too small, also for subnormals.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

inline std::uint16_t float_to_fp16(float f) {
  auto x = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = (x >> 16) & 0x8000u;
  x &= 0x7fffffffu;
  std::uint32_t half;
  if (x > 0x7f800000u) {
    half = 0x7e00u;
  } else if (x >= 0x477ff000u) {  // 65,520 and more
    half = 0x7c00u;
  } else if (x < 0x38800000u) {  // below 2^-14: 0.5 has the unit in the last place that a subnormal half has
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(x) + 0.5f) - 0x3f000000u;
  } else {
    half = (x + 0xfffu + ((x >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

// An 8-bit float of a sign, exponent bits and mantissa_bits.
struct Fp8 {
  int mantissa_bits, bias;
  float largest;
  bool infinities;

  float value(std::uint8_t bits) const {
    const int magnitude = bits & 0x7f, exponent = magnitude >> mantissa_bits;
    const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const float sign = bits & 0x80 ? -1.f : 1.f;
    if (infinities && exponent == 31) return sign * (mantissa ? NAN : INFINITY);
    if (!infinities && magnitude == 0x7f) return sign * NAN;
    const int implied = exponent ? 1 << mantissa_bits : 0;
    return sign *
           std::ldexp(static_cast<float>(implied + mantissa), std::max(exponent, 1) - bias - mantissa_bits);
  }
  std::uint8_t bits(double f) const {
    const std::uint8_t sign = std::signbit(f) ? 0x80 : 0;
    if (std::isnan(f)) return sign | 0x7f;
    const double x = std::min(std::fabs(f), double{largest});
    int exponent = 1 - bias;
    if (x >= std::ldexp(1., exponent)) exponent = std::ilogb(x);
    // In units of the last place. A carry moves to the next exponent by itself.
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(x, mantissa_bits - exponent)));
    return static_cast<std::uint8_t>(sign | (((exponent + bias - 1) << mantissa_bits) + units));
  }
};
inline constexpr Fp8 e4m3{3, 7, 448.f, false}, e5m2{2, 15, 57344.f, true};

template <class Integer>
Integer float_to_integer8(double f) {
  using Limits = std::numeric_limits<Integer>;
  return std::isnan(f) ? Integer{0}
                       : static_cast<Integer>(
                             std::clamp(std::nearbyint(f), double{Limits::min()}, double{Limits::max()}));
}
// The value of an 8-bit element that a number is rounded to.
inline double rounded_to_8_bits(DType dtype, double x) {
  switch (dtype) {
    case DType::fp8_e4m3:
      return e4m3.value(e4m3.bits(x));
    case DType::fp8_e5m2:
      return e5m2.value(e5m2.bits(x));
    case DType::uint8:
      return float_to_integer8<unsigned char>(x);
    default:
      return float_to_integer8<signed char>(x);
  }
}

inline double load_element(const void* data, DType dtype, std::int64_t index) {
  const char* at = static_cast<const char*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
  std::uint16_t half;
  std::uint32_t word;
  switch (dtype) {
    case DType::bf16:
      std::memcpy(&half, at, 2);
      return bf16_to_float(half);
    case DType::fp16:
      std::memcpy(&half, at, 2);
      return fp16_to_float(half);
    case DType::fp32:
      std::memcpy(&word, at, 4);
      return std::bit_cast<float>(word);
    case DType::int32:
      std::memcpy(&word, at, 4);
      return static_cast<std::int32_t>(word);
    case DType::int64: {
      std::int64_t integer;
      std::memcpy(&integer, at, 8);
      return static_cast<double>(integer);
    }
    case DType::int8:
      return static_cast<signed char>(*at);
    case DType::fp8_ds_mla:  // a byte
    case DType::uint8:
      return static_cast<unsigned char>(*at);
    case DType::fp8_e4m3:
      return e4m3.value(static_cast<std::uint8_t>(*at));
    case DType::fp8_e5m2:
      return e5m2.value(static_cast<std::uint8_t>(*at));
  }
  return 0;
}

inline void store_element(void* data, DType dtype, std::int64_t index, float value) {
  char* at = static_cast<char*>(data) + index * static_cast<std::int64_t>(size_of(dtype));
  std::uint16_t half;
  switch (dtype) {
    case DType::bf16:
      half = float_to_bf16(value), std::memcpy(at, &half, 2);
      break;
    case DType::fp16:
      half = float_to_fp16(value), std::memcpy(at, &half, 2);
      break;
    case DType::fp32:
      std::memcpy(at, &value, 4);
      break;
    case DType::int32: {
      const auto integer = static_cast<std::int32_t>(value);
      std::memcpy(at, &integer, 4);
      break;
    }
    case DType::int64: {
      const auto integer = static_cast<std::int64_t>(value);
      std::memcpy(at, &integer, 8);
      break;
    }
    case DType::int8:
      *at = static_cast<char>(float_to_integer8<signed char>(value));
      break;
    case DType::fp8_ds_mla:
    case DType::uint8:
      *at = static_cast<char>(float_to_integer8<unsigned char>(value));
      break;
    case DType::fp8_e4m3:
      *at = static_cast<char>(e4m3.bits(value));
      break;
    case DType::fp8_e5m2:
      *at = static_cast<char>(e5m2.bits(value));
      break;
  }
}

}  // namespace flashjit::verify
