// Tensors over memory that other types own: spans and vectors, DLPack, CUDA's array interface.
//
//   std::vector<float> q(batch * seqlen * heads * head_dim);
//   kernel.launch({.q = flashjit::wrap(q, {batch, seqlen, heads, head_dim}), ...});
//
// Nothing is copied or kept: the memory must outlast the launches. All throw invalid_argument for elements,
// sizes or devices that no tensor has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "codegen/arguments/attention_args.hpp"

namespace flashjit {

// `count` elements at `data` as a row-major tensor of the shape, which must have as many.
FLASHJIT_API Tensor wrap(void* data, std::size_t count, DType dtype, Device device,
                         std::span<const std::int64_t> shape);

// The dtype of C++'s own numbers. 16-bit and 8-bit floats have none: they are wrapped with their dtype.
template <class Element>
constexpr DType dtype_of() {
  using Number = std::remove_const_t<Element>;
  if constexpr (std::is_same_v<Number, float>)
    return DType::fp32;
  else if constexpr (std::is_same_v<Number, std::int32_t>)
    return DType::int32;
  else if constexpr (std::is_same_v<Number, std::int64_t>)
    return DType::int64;
  else if constexpr (std::is_same_v<Number, std::int8_t>)
    return DType::int8;
  else
    static_assert(std::is_same_v<Number, std::uint8_t>, "give the dtype of these elements");
  return DType::uint8;
}

// A contiguous range of host memory, or of a device's if `device` says so. Inputs may be const: a launch
// writes outputs only.
template <class Range>
Tensor wrap(Range&& elements, std::initializer_list<std::int64_t> shape, Device device = {}) {
  const std::span range(elements);
  using Element = typename decltype(range)::element_type;
  return wrap(const_cast<std::remove_const_t<Element>*>(range.data()), range.size(), dtype_of<Element>(),
              device, std::span(shape.begin(), shape.size()));
}
// The same for elements that hold the bits of a dtype: std::uint16_t of bf16 or fp16, std::uint8_t of fp8.
template <class Range>
Tensor wrap(Range&& elements, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
  const std::span range(elements);
  using Element = typename decltype(range)::element_type;
  return wrap(const_cast<std::remove_const_t<Element>*>(range.data()),
              range.size() * sizeof(Element) / size_of(dtype), dtype, device,
              std::span(shape.begin(), shape.size()));
}

// The layout of DLPack's DLTensor (dlpack.h, 1.x), which this header does not include.
struct DlpackTensor {
  void* data;
  std::int32_t device_type, device_id;  // 1: cpu; 2: cuda; 3: pinned host memory; 13: managed memory
  std::int32_t ndim;
  std::uint8_t code, bits;  // of the dtype
  std::uint16_t lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t byte_offset;
};
FLASHJIT_API Tensor wrap_dlpack(const DlpackTensor& tensor);
// A DLTensor, or what has its members: `managed->dl_tensor`.
template <class DLTensor>
Tensor wrap_dlpack(const DLTensor& t) {
  return wrap_dlpack(DlpackTensor{t.data, static_cast<std::int32_t>(t.device.device_type), t.device.device_id,
                                  t.ndim, t.dtype.code, t.dtype.bits, t.dtype.lanes, t.shape, t.strides,
                                  t.byte_offset});
}

// __cuda_array_interface__ (version 3), or NumPy's __array_interface__ with a CPU as device: the address of
// "data", "typestr" such as "<f4", "shape", and "strides" in bytes, empty for None. "<V2" and "<u2" are the
// bits of bf16, "|V1" and "|u1" those of uint8.
FLASHJIT_API Tensor wrap_array_interface(std::uintptr_t data, std::string_view typestr,
                                         std::span<const std::int64_t> shape,
                                         std::span<const std::int64_t> byte_strides, Device device);

}  // namespace flashjit
