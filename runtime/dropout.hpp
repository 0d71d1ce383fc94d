// Computes on the host which weights dropout drops. Every kernel drops the same
// weights, so this serves checks, and other code that is to drop the same.
//
//   std::vector<std::uint8_t> keep(flashjit::dropout_mask_size(shape));
//   flashjit::dropout_mask({.p = 0.1, .seed = 42}, shape, keep);
//
// All functions throw invalid_argument; the message names the problem, such as a sequence
// longer than longest_sequence (shape.hpp) or a mask with more elements than 64 bits count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codegen/base/error.hpp"
#include "codegen/base/shape.hpp"

namespace flashjit {

struct Dropout {
  double p = 0;
  std::uint64_t seed = 0, offset = 0;
};

// p in units of 2^-32, rounded to the nearest, as kernels use it. p is between 0 and 1.
FLASHJIT_API std::uint64_t dropout_threshold(double p);
// The factor for kept weights: 1 / (1 - p) with the rounded p; 0 if no weight is kept.
FLASHJIT_API double dropout_scale(double p);

// Sets keep[key] to 1 if the weight of that key is kept, to 0 if it is dropped.
// `row` and `key` are positions within a sequence; `head` is a query head. The keys are those from first_key
// on.
FLASHJIT_API void dropout_row(const Dropout& dropout, int batch, int head, int row,
                              std::span<std::uint8_t> keep, int first_key = 0);

// The same for all rows: keep is [batch, num_heads_q, seqlen_q, seqlen_k],
// row-major, and has dropout_mask_size(shape) elements.
FLASHJIT_API void dropout_mask(const Dropout& dropout, const Shape& shape, std::span<std::uint8_t> keep);
FLASHJIT_API std::size_t dropout_mask_size(const Shape& shape);

}  // namespace flashjit
