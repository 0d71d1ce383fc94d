// The types of tensors' elements.
#pragma once

#include <array>
#include <cstddef>

#include "../base/error.hpp"

namespace flashjit {

// int32: lengths and offsets; int64: seeds and slots. fp8_e4m3 is E4M3FN (largest value 448, no infinity),
// fp8_e5m2 is IEEE-like (largest value 57,344), both of the Open Compute Project's 8-bit formats. fp8_ds_mla:
// a spec's kv_dtype alone, for rows of templates/shared/ds_mla.h; the tensor's elements are their bytes,
// uint8.
enum class DType { fp32, fp16, bf16, int32, int64, int8, uint8, fp8_e4m3, fp8_e5m2, fp8_ds_mla };
inline constexpr std::array float_dtypes = {DType::bf16, DType::fp16, DType::fp32};
FLASHJIT_API const char* to_string(DType) noexcept;
// Bytes of one element.
FLASHJIT_API std::size_t size_of(DType) noexcept;

}  // namespace flashjit
