#include "runtime/parallel/tensor_parts.hpp"

#include <bit>
#include <cstdint>
#include <cstring>

#include "codegen/base/float_state.hpp"

namespace flashjit {
namespace {

// Calls row(to, from, count) for each row of the last dimension, whose elements are `of_to` and `of_from`
// bytes apart.
template <class Row>
void for_each_row(const Tensor& to, const Tensor& from, const Row& row) {
  std::int64_t sizes[4] = {1, 1, 1, 1}, to_strides[4] = {}, from_strides[4] = {};
  for (int i = 0; i < to.rank; ++i) {
    const int at = 4 - to.rank + i;
    sizes[at] = to.shape[static_cast<std::size_t>(i)];
    to_strides[at] = to.strides[static_cast<std::size_t>(i)] * static_cast<std::int64_t>(size_of(to.dtype));
    from_strides[at] =
        from.strides[static_cast<std::size_t>(i)] * static_cast<std::int64_t>(size_of(from.dtype));
  }
  auto* const data = static_cast<std::byte*>(to.data);
  const auto* const other = static_cast<const std::byte*>(from.data);
  for (std::int64_t a = 0; a < sizes[0]; ++a)
    for (std::int64_t b = 0; b < sizes[1]; ++b)
      for (std::int64_t c = 0; c < sizes[2]; ++c)
        row(data + a * to_strides[0] + b * to_strides[1] + c * to_strides[2],
            other + a * from_strides[0] + b * from_strides[1] + c * from_strides[2], sizes[3], to_strides[3],
            from_strides[3]);
}

float load(const std::byte* at) {
  float value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The nearest number of the type, ties to even. NaN stays NaN.
std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
std::uint16_t to_fp16(float x) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
}

}  // namespace

Tensor part_of(const Tensor& t, int dim, std::int64_t begin, std::int64_t count) {
  Tensor part = t;
  const auto at = static_cast<std::size_t>(dim);
  part.data =
      static_cast<std::byte*>(t.data) + begin * t.strides[at] * static_cast<std::int64_t>(size_of(t.dtype));
  part.shape[at] = count;
  return part;
}

Tensor at_of(const Tensor& t, int dim, std::int64_t index) {
  Tensor one = part_of(t, dim, index, 1);
  for (int i = dim; i + 1 < t.rank; ++i) {
    one.shape[static_cast<std::size_t>(i)] = t.shape[static_cast<std::size_t>(i + 1)];
    one.strides[static_cast<std::size_t>(i)] = t.strides[static_cast<std::size_t>(i + 1)];
  }
  --one.rank;
  return one;
}

void copy_elements(const Tensor& to, const Tensor& from) {
  const std::size_t size = size_of(to.dtype);
  for_each_row(
      to, from,
      [&](std::byte* a, const std::byte* b, std::int64_t count, std::int64_t of_a, std::int64_t of_b) {
        for (std::int64_t i = 0; i < count; ++i) std::memcpy(a + i * of_a, b + i * of_b, size);
      });
}

void convert_elements(const Tensor& to, const Tensor& from) {
  const DefaultFloatState state;
  if (to.dtype == DType::fp32) return copy_elements(to, from);
  for_each_row(
      to, from,
      [&](std::byte* a, const std::byte* b, std::int64_t count, std::int64_t of_a, std::int64_t of_b) {
        for (std::int64_t i = 0; i < count; ++i) {
          const float value = load(b + i * of_b);
          const std::uint16_t rounded = to.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
          std::memcpy(a + i * of_a, &rounded, sizeof rounded);
        }
      });
}

void add_elements(const Tensor& to, const Tensor& from) {
  const DefaultFloatState state;
  for_each_row(
      to, from,
      [&](std::byte* a, const std::byte* b, std::int64_t count, std::int64_t of_a, std::int64_t of_b) {
        for (std::int64_t i = 0; i < count; ++i) {
          const float sum = load(a + i * of_a) + load(b + i * of_b);
          std::memcpy(a + i * of_a, &sum, sizeof sum);
        }
      });
}

void clear_elements(const Tensor& to) {
  const float zero = 0;
  for_each_row(to, to,
               [&](std::byte* a, const std::byte*, std::int64_t count, std::int64_t of_a, std::int64_t) {
                 for (std::int64_t i = 0; i < count; ++i) std::memcpy(a + i * of_a, &zero, sizeof zero);
               });
}

}  // namespace flashjit
