// Which weights dropout drops, on the host: what every kernel drops, for checks and for code that is to drop
// the same.
//
//   std::vector<std::uint8_t> keep(flashjit::dropout_mask_size(shape));
//   flashjit::dropout_mask({.p = 0.1, .seed = 42}, shape, keep);
//
// All functions throw invalid_argument, naming what is wrong: a sequence is longer than longest_sequence
// (shape.hpp), or a mask has more elements than 64 bits count, among the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codegen/error.hpp"
#include "codegen/shape.hpp"

namespace flashjit {

struct Dropout {
  double p = 0;
  std::uint64_t seed = 0, offset = 0;
};

// p as kernels have it, in units of 2^-32: rounded to the nearest. p is between 0 and 1.
FLASHJIT_API std::uint64_t dropout_threshold(double p);
// What kept weights are multiplied by: 1 / (1 - p) of that p; 0 where nothing is kept.
FLASHJIT_API double dropout_scale(double p);

// keep[key]: 1 where the weight of that key is kept, 0 where it is dropped. Positions count within a
// sequence, heads are query heads.
FLASHJIT_API void dropout_row(const Dropout& dropout, int batch, int head, int row,
                              std::span<std::uint8_t> keep);

// The same of all rows: [batch, num_heads_q, seqlen_q, seqlen_k], row-major.
FLASHJIT_API void dropout_mask(const Dropout& dropout, const Shape& shape, std::span<std::uint8_t> keep);
FLASHJIT_API std::size_t dropout_mask_size(const Shape& shape);

}  // namespace flashjit
