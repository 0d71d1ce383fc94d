// Parts of tensors, and what ranks on CPUs do with them beside kernels.
#pragma once

#include <cstddef>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Indices [begin, begin + count) of a dimension, in the same memory.
Tensor part_of(const Tensor& t, int dim, std::int64_t begin, std::int64_t count);
// The same without the dimension: index `at` of it.
Tensor at_of(const Tensor& t, int dim, std::int64_t at);

// All of equal shapes, up to rank 4. `from` is float32 in the last two; they are rounded to the nearest.
void copy_elements(const Tensor& to, const Tensor& from);  // of equal dtypes
void convert_elements(const Tensor& to, const Tensor& from);
void add_elements(const Tensor& to, const Tensor& from);  // `to` is float32, too
void clear_elements(const Tensor& to);

}  // namespace flashjit
