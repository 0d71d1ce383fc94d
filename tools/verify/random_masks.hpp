// Seeded run-time data for every mask of a spec: lengths, windows, block lists, trees.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/masks.hpp"

namespace flashjit::verify {

struct MaskData {
  MaskTables tables;
  std::optional<int> window_left, window_right, num_sinks;

  // Makes lengths of packed sequences no longer than the sequences, whose starts are given.
  void limit_lengths(const AttentionArgs& starts);
  // Fills what is not a table.
  void set_sizes(AttentionArgs& args) const;
};

struct MaskDataOptions {
  double density = 0.25;                             // block_sparse: share of the blocks that are listed
  double partial = 0.1;                              // of those, how many have a bitmask
  std::optional<int> window_left{}, window_right{};  // default: a quarter of seqlen_k, 0
  bool hard = false;  // lengths and sizes at their limits, empty lists, prefixes of their own: for tests
};

// `shape` has the longest lengths of the batch, at most longest_sequence. Throws invalid_argument where
// tables would take gigabytes.
MaskData random_mask_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                          const MaskDataOptions& options = {});

}  // namespace flashjit::verify
