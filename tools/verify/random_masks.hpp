// Seeded run-time data for every mask of a spec: lengths, windows, block lists, trees.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/masks.hpp"

namespace flashjit::verify {

// Arguments that are integer tables of masks, with their number of dimensions.
struct TableArgument {
  const char* name;
  std::optional<Tensor> AttentionArgs::* argument;
  int rank;
};
inline constexpr TableArgument mask_table_arguments[] = {
    {"seqlens_q", &AttentionArgs::seqlens_q, 1},
    {"seqlens_k", &AttentionArgs::seqlens_k, 1},
    {"block_offsets", &AttentionArgs::block_offsets, 3},
    {"block_indices", &AttentionArgs::block_indices, 1},
    {"block_bitmask_of", &AttentionArgs::block_bitmask_of, 1},
    {"block_bitmasks", &AttentionArgs::block_bitmasks, 3},
    {"tree_bits", &AttentionArgs::tree_bits, 3},
    {"prefix_lengths", &AttentionArgs::prefix_lengths, 1},
};

const char* name_of(std::optional<Tensor> AttentionArgs::* table);

struct MaskData {
  MaskTables tables;
  std::optional<int> window_left, window_right;
  int num_sinks = 0;

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
