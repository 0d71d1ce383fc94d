// Seeded values of the tables and scalars that a spec declares for its formulas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

struct NamedTable {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> elements;  // row-major

  // In host memory, which must outlive the view.
  Tensor view() const;
};
struct NamedScalar {
  std::string name;
  double value;
};
struct NamedData {
  std::vector<NamedTable> tables;
  std::vector<NamedScalar> scalars;

  // The arguments of a launch, which refer to this object.
  std::vector<NamedArgument> arguments() const;
};

// `shape` has the longest lengths of the batch, and the totals of packed sequences. Reals are bell-shaped.
// Integers along rows or keys ascend, as the ids of a few documents do; others are places of keys; int8 and
// uint8 are 0 or 1. Scalars: 20, and a quarter of seqlen_k. A dimension of its own has 128 elements; one that
// may be 1 has all its elements, in tables that stay below 2^27. With `hard` all of these are anything.
// Throws invalid_argument if the tables would take gigabytes.
NamedData random_named_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                            bool hard = false);

}  // namespace flashjit::verify
