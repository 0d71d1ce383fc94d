// Parameters that formulas and sink logits add to those of a kernel.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

constexpr int most_formula_tables = 8, most_formula_scalars = 16, most_table_dims = 6;

// A table that formulas read. Indices are clamped to [0, size). A dimension total_q or total_k is indexed
// within the batch entry's own rows or keys.
struct FormulaTable {
  const void* data;              // read only where a launch has rows and keys
  i64 strides[most_table_dims];  // of elements; in bytes they fit 32 bits, but for batch entries and heads
  int sizes[most_table_dims];
};

struct FormulaParams {
  float scale;                        // softmax_scale, in natural units
  u32 scalars[most_formula_scalars];  // the bits of an int32 or a float32
  FormulaTable tables[most_formula_tables];
  const float* sink_logits;  // [num_heads_q], in natural units; null if the spec has none
  i64 sink_stride;
};

// Params: those of the kernel, with its pages if it has any.
template <class Params>
struct WithFormulas : Params {
  FormulaParams formulas;
};

// The gradient of a table that formulas read, which has its sizes.
struct GradientTable {
  float* data;                   // null if the table has no gradient, or no elements
  i64 strides[most_table_dims];  // of elements
  i64 count;                     // of elements
  // The elements' exact sums, row-major (shared/exact_sum.h), in the workspace; null where `data` is added
  // to.
  i64* sums;
  int sizes[most_table_dims], rank;
  bool is_contiguous;  // row-major without gaps

  // An element by its row-major place.
  FLASHJIT_FN float* element(i64 place) const {
    if (is_contiguous) return data + place;
    float* at = data;
    for (int dim = rank - 1; dim >= 0; --dim) {
      at += place % sizes[dim] * strides[dim];
      place /= sizes[dim];
    }
    return at;
  }
};
constexpr int most_gradients = most_formula_tables + 1;
struct GradientParams {
  GradientTable tables[most_gradients];  // of tables at their places, then of sink logits
  FLASHJIT_FN const GradientTable& sink_logits() const { return tables[most_formula_tables]; }
};

// With the gradients of what formulas read.
template <class Params>
struct WithGradients : WithFormulas<Params> {
  GradientParams gradients;
};

}  // namespace flashjit::device
