// Run-time data of a spec's masks, as an application might give them: what a tuner measures with.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/masks.hpp"

namespace flashjit {

// Lengths between a quarter of the longest and all, lists of a quarter of the blocks, chains as trees.
MaskTables typical_mask_tables(const AttentionSpec& spec, const Shape& shape);

// A window of a quarter of the keys before each row, and four sinks where there are some.
void set_typical_mask_sizes(const AttentionSpec& spec, const Shape& shape, AttentionArgs& args);

// Lengths of a batch: the first is the longest, the others between a quarter of that and all.
std::vector<std::int32_t> typical_lengths(const Shape& shape, int longest, std::uint64_t seed);

}  // namespace flashjit
