// Reads and writes tensor elements in host memory. Software does the conversions: reading is exact, writing
// rounds to nearest even.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codegen/spec.hpp"

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

// Bytes of an element.
inline std::size_t element_size(DType dtype) {
  return dtype == DType::bf16 || dtype == DType::fp16 ? 2 : 4;
}

inline double load_element(const void* data, DType dtype, std::int64_t index) {
  const char* at = static_cast<const char*>(data) + index * static_cast<std::int64_t>(element_size(dtype));
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
  }
  return 0;
}

inline void store_element(void* data, DType dtype, std::int64_t index, float value) {
  char* at = static_cast<char*>(data) + index * static_cast<std::int64_t>(element_size(dtype));
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
    }
  }
}

}  // namespace flashjit::verify
