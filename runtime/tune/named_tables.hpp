// Typical values of the tables and scalars that a spec declares for its formulas.
#pragma once

#include <cstddef>
#include <vector>

#include "codegen/spec/declarations.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct TypicalTable {
  const DeclaredTable* declared;  // the spec's
  std::vector<std::int64_t> shape;
  std::vector<char> elements;  // row-major
};

// Reals are multiples of 1/64 below 2. Integers along rows or keys are the ids of four documents, others are
// places of keys; int8 and uint8 are 0 or 1. A dimension of its own has 128 elements. Dimensions that may be
// 1 are: batch and heads always, others if a table would have more than 2^27 elements. `shape` has the totals
// of packed sequences. Throws invalid_argument if a table would take gigabytes.
std::vector<TypicalTable> typical_named_tables(const AttentionSpec& spec, const Shape& shape);

// fp32: 20; int32: a quarter of seqlen_k.
double typical_scalar(const DeclaredScalar& scalar, const Shape& shape);

}  // namespace flashjit
