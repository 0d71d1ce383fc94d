// Seeded run-time data for every mask of a spec: lengths, windows, block lists, trees; lengths and pages of a
// cache.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/masks.hpp"

namespace flashjit::verify {

struct MaskData {
  MaskTables tables;
  std::optional<int> window_left, window_right, num_sinks;
  std::vector<std::int64_t> row_offset, key_offset;  // [batch], with offsets
  // Cuts the lengths to those of the packed sequences, whose starts `starts` holds, if there are some. Gives
  // a tree prefix_lengths if a batch entry has fewer keys than rows.
  void fit_lengths(const AttentionSpec& spec, const Shape& shape, const AttentionArgs& starts);
  // Sets the arguments that are numbers.
  void set_sizes(AttentionArgs& args) const;
};

struct MaskDataOptions {
  double density = 0.25;                             // block_sparse: share of the blocks that are listed
  double partial = 0.1;                              // share of the listed blocks that have a bitmask
  std::optional<int> window_left{}, window_right{};  // default: a quarter of seqlen_k, 0
  std::vector<std::int32_t> lengths_k{};             // seqlens_k of decode; empty: drawn, or all keys
  bool hard = false;  // lengths and sizes at their limits, empty lists, prefixes of their own: for tests
};

// `shape` has the longest lengths of the batch, at most longest_sequence. Throws invalid_argument if the
// tables would take gigabytes.
MaskData random_mask_data(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                          const MaskDataOptions& options = {});

}  // namespace flashjit::verify
