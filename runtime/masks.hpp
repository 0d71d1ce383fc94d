// Makes mask tables on the host from the formats that applications use: dense
// masks, CSR, FlexAttention's block masks, segment ids, trees of draft tokens.
// A CPU kernel uses the tables in place; for a GPU, copy each to its memory:
//
//   flashjit::MaskTables tables = flashjit::document_mask({.block_m = 128, .block_n = 128}, ids, ids, 1);
//   for (flashjit::MaskTable& table : tables) args.*table.argument = table.view();
//
// All functions throw invalid_argument; the message names the wrong value and its place.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "flashjit.hpp"

namespace flashjit {

// One mask argument of a launch: an int32 table, row-major.
struct MaskTable {
  std::optional<Tensor> AttentionArgs::* argument = nullptr;
  std::vector<std::int64_t> shape{};
  std::vector<std::int32_t> values{};

  // The table in place; valid as long as the table lives.
  Tensor view() { return view(values.data(), {}); }
  // A copy of the table in other memory.
  Tensor view(void* data, Device device) const {
    return Tensor::contiguous(data, DType::int32, device, shape);
  }
};
using MaskTables = std::vector<MaskTable>;

// A table has at most 2^31 - 1 elements, except block_bitmasks. A sequence has
// at most longest_sequence rows or keys (shape.hpp). Larger ones are refused.

// The sizes that block lists are made for. `heads`: query
// heads, or 1 if all heads share their lists (per_head false).
struct BlockListShape {
  int batch = 1, heads = 1;
  int seqlen_q = 0, seqlen_k = 0;
};

// The number of lists of this shape: batch * heads * query blocks.
// Throws invalid_argument for a shape that block lists cannot have.
FLASHJIT_API std::int64_t count_block_lists(const BlockSparseMask& mask, const BlockListShape& shape);

// The number of blocks that lists of this shape name at most: the elements that make_block_lists takes of
// block_indices and block_bitmask_of. Throws invalid_argument likewise.
FLASHJIT_API std::int64_t most_listed_blocks(const BlockSparseMask& mask, const BlockListShape& shape);

// Whether a row sees a key.
using SeesPair = std::function<bool(int batch, int head, int row, int key)>;

// Makes block lists from a dense mask: [batch, heads, seqlen_q, seqlen_k]
// bytes, row-major, nonzero if the row sees the key.
FLASHJIT_API MaskTables block_sparse_from_dense(const BlockSparseMask& mask, const BlockListShape& shape,
                                                std::span<const std::uint8_t> seen);

// Makes block lists from compressed sparse rows. The list of query block i, batch entry b and head
// h is columns[e] for e from offsets[j] up to, but not including, offsets[j + 1], with j = (b *
// heads + h) * query blocks + i. All listed blocks are seen whole; a list may be in any order.
FLASHJIT_API MaskTables block_sparse_from_csr(const BlockSparseMask& mask, const BlockListShape& shape,
                                              std::span<const std::int32_t> offsets,
                                              std::span<const std::int32_t> columns);

// FlexAttention's BlockMask (PyTorch). Counts are [batch, heads, query blocks]; indices
// are [batch, heads, query blocks, columns], with a list's blocks first. Blocks of
// full_kv_indices are seen whole. In a block of kv_indices, a row sees the keys for which
// `sees` is true; without `sees` it sees all of them, for specs whose other masks decide.
struct FlexBlockMask {
  std::span<const std::int32_t> kv_num_blocks, kv_indices;
  std::span<const std::int32_t> full_kv_num_blocks{}, full_kv_indices{};
};
FLASHJIT_API MaskTables block_sparse_from_flex(const BlockSparseMask& mask, const BlockListShape& shape,
                                               const FlexBlockMask& blocks, const SeesPair& sees = {});

// Makes block lists with which rows see the keys of their own segment.
// segment_ids_q is [batch, seqlen_q], segment_ids_k is [batch, seqlen_k], with
// any numbers in any order. Together with a causal mask this packs documents.
FLASHJIT_API MaskTables document_mask(const BlockSparseMask& mask,
                                      std::span<const std::int32_t> segment_ids_q,
                                      std::span<const std::int32_t> segment_ids_k, int batch);

// Makes a tree's bits with which every row sees itself and its ancestors.
// `parents` is [batch, tokens]; -1 for a root. A parent comes before its children.
FLASHJIT_API MaskTables tree_from_parents(std::span<const std::int32_t> parents, int batch);

}  // namespace flashjit
