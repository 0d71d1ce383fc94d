// Run-time data that a spec's launches need beside their tensors, as an application might give them: what a
// tuner measures with.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/masks.hpp"

namespace flashjit {

// Where sequences are packed or padded, lengths between a quarter of the longest and all, or as many rows as
// the shape's totals say; lists of a quarter of the blocks, chains as trees. Throws invalid_argument where
// packed sequences have more rows than an int32 counts.
MaskTables typical_tables(const AttentionSpec& spec, const Shape& shape);

// The shape with the totals of packed sequences, as the tables have them.
Shape with_totals(Shape shape, const MaskTables& tables);

// A window of a quarter of the keys before each row, four sinks where there are some; dropout.
void set_typical_numbers(const AttentionSpec& spec, const Shape& shape, AttentionArgs& args);

}  // namespace flashjit
