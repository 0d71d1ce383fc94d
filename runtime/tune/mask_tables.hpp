// Typical mask tables and numbers for a spec, like those of an application; the tuner measures with them.
#pragma once

#include <cstdint>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/masks.hpp"

namespace flashjit {

// Packed or padded sequences have lengths between a quarter of the longest and all of it,
// or as many rows as the shape's totals say. Lists have a quarter of the blocks; trees are
// chains. Throws invalid_argument if packed sequences have more rows than an int32 counts.
MaskTables typical_tables(const AttentionSpec& spec, const Shape& shape);

// from_slots or to_slots of a copy_kv: places of all rows in random order, each once. Rows for which the
// caches have no place go nowhere. row_offset or key_offset: the last rows are the last keys of the whole; a
// tree begins with the first row.
bool is_places(const Argument& argument);
std::vector<std::int64_t> typical_places(const Argument& places, const AttentionSpec& spec,
                                         const Shape& shape);

// The shape with the tables' totals of packed sequences.
Shape with_totals(Shape shape, const MaskTables& tables);

// Sets a window of a quarter of the keys before each row, four sinks if the mask
// has sinks, a dropout of 0.1, and the longest lengths of packed sequences.
void set_typical_numbers(const AttentionSpec& spec, const Shape& shape, AttentionArgs& args);

}  // namespace flashjit
