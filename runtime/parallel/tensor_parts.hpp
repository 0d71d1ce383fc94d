// Parts of tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Indices [begin, begin + count) of a dimension, in the same memory.
Tensor part_of(const Tensor& t, int dim, std::int64_t begin, std::int64_t count);
// The same without the dimension: index `at` of it.
Tensor at_of(const Tensor& t, int dim, std::int64_t at);

// Rows of bytes that are copied together: `height` rows of `width` bytes, the pitch of each apart.
struct Block {
  std::byte* to;
  const std::byte* from;
  std::int64_t width, height, to_pitch, from_pitch;
};
// A copy between tensors of one dtype and one shape, in as few blocks as their strides allow.
std::vector<Block> blocks_of(const Tensor& to, const Tensor& from);

// Copies elements of one dtype in host memory. Both have one shape.
void copy_elements(const Tensor& to, const Tensor& from);

}  // namespace flashjit
