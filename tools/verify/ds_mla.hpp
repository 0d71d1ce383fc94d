// A cache of fp8_ds_mla on the host, read as what it stands for.
#pragma once

#include <cstdint>

#include "runtime/flashjit.hpp"
#include "templates/shared/ds_mla.h"
#include "tools/verify/element.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::verify {

// The parts of its keys, as tensors over the same memory. Strides are multiples of four bytes.
struct DsMlaParts {
  Tensor columns, scales, rotary;

  explicit DsMlaParts(const Tensor& cache)
      : columns(part(cache, DType::fp8_e4m3, 0, device::DsMla::columns)),
        scales(part(cache, DType::fp32, device::DsMla::scales, device::DsMla::groups)),
        rotary(part(cache, DType::bf16, device::DsMla::rotary, device::DsMla::rotary_columns)) {}

 private:
  static Tensor part(const Tensor& cache, DType dtype, int first, int count) {
    Tensor tensor = cache;
    tensor.data = static_cast<char*>(cache.data) + first;
    tensor.dtype = dtype;
    const int last = cache.rank - 1;
    tensor.shape[last] = count;
    for (int i = 0; i < last; ++i) tensor.strides[i] /= static_cast<std::int64_t>(size_of(dtype));
    tensor.strides[last] = 1;
    return tensor;
  }
};

// Fills each of them as fill_random() does.
inline void fill_random_ds_mla(const Tensor& cache, std::uint64_t seed, const RandomOptions& options = {}) {
  const DsMlaParts parts(cache);
  for (const Tensor& part : {parts.columns, parts.scales, parts.rotary}) fill_random(part, seed, options);
}

// The scale of 128 columns of the key whose bytes begin at `index`.
inline double ds_mla_scale(const Tensor& cache, std::int64_t index, int group) {
  return load_element(static_cast<const char*>(cache.data) + index + device::DsMla::scales, DType::fp32,
                      group);
}
// A column's value.
inline double ds_mla_value(const Tensor& cache, std::int64_t index, int column) {
  const char* const key = static_cast<const char*>(cache.data) + index;
  if (column >= device::DsMla::columns)
    return load_element(key + device::DsMla::rotary, DType::bf16, column - device::DsMla::columns);
  return ds_mla_scale(cache, index, column / device::DsMla::group) *
         load_element(key, DType::fp8_e4m3, column);
}

}  // namespace flashjit::verify
