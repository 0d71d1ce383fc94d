// Seeded test data: bell-shaped values with outliers and long rows, the kind that breaks a careless softmax.
// An element depends only on the seed and on its position in the tensor: not on strides, dtype, platform or
// standard library.
#pragma once

#include <cstdint>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// 64 well-mixed bits of (seed, counter).
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter);

struct RandomOptions {
  float scale = 1;           // standard deviation
  int outlier_every = 1024;  // one element of this many is 8 times as large; 0: none
  int long_row_every = 32;   // one row (last dimension) of this many is 4 times as large; 0: none
};

// Writes every element of a tensor, which is in host memory whatever its device field says.
void fill_random(const Tensor& tensor, std::uint64_t seed, const RandomOptions& options = {});

}  // namespace flashjit::verify
