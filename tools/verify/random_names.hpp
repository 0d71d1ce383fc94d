// Seeded values of the tables and scalars that a spec declares for its formulas, for tests.
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
// Integers along rows or keys ascend, as ids of documents do; others are places of keys; int8 and uint8 are
// mostly 0 and 1. Some are anything. Sizes that a table may choose are random.
NamedData random_named_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed);

}  // namespace flashjit::verify
