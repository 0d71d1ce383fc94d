// Seeded test data: bell-shaped values with outliers and long rows, the kind that breaks a careless softmax.
// Depends on the seed and an element's position in its tensor only: not on strides, dtype, platform or
// standard library.
#pragma once

#include <cstdint>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// 64 well-mixed bits of (seed, counter).
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t counter);

struct RandomOptions {
  float scale = 1;           // standard deviation
  int outlier_every = 1024;  // one element of so many is 8 times as large; 0: none
  int long_row_every = 32;   // one row (along the last dimension) of so many is 4 times as large; 0: none
};

// Writes every element of a tensor in host memory (its device is not looked at).
void fill_random(const Tensor& tensor, std::uint64_t seed, const RandomOptions& options = {});

}  // namespace flashjit::verify
