// Tables for masks, made on the host from what applications have: dense masks, CSR, FlexAttention's block
// masks, segment ids, trees of draft tokens. A CPU kernel takes them where they are; for a GPU, copy each to
// its memory:
//
//   flashjit::MaskTables tables = flashjit::document_mask({.block_m = 128, .block_n = 128}, ids, ids, 1);
//   for (flashjit::MaskTable& table : tables) args.*table.argument = table.view();
//
// All functions throw invalid_argument, naming what is wrong and where.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "flashjit.hpp"

namespace flashjit {

// One argument of a launch: an int32 table, row-major.
struct MaskTable {
  std::optional<Tensor> AttentionArgs::* argument = nullptr;
  std::vector<std::int64_t> shape{};
  std::vector<std::int32_t> values{};

  // The table where it is, as long as it lives.
  Tensor view() { return view(values.data(), {}); }
  // A copy of it in other memory.
  Tensor view(void* data, Device device) const {
    return Tensor::contiguous(data, DType::int32, device, shape);
  }
};
using MaskTables = std::vector<MaskTable>;

// A table has at most 2^31 - 1 elements, except bitmasks, and a sequence at most longest_sequence rows or
// keys (shape.hpp); what needs more is refused.

// What block lists are made for. Heads: query heads, or 1 where all share a list (per_head false).
struct BlockListShape {
  int batch = 1, heads = 1;
  int seqlen_q = 0, seqlen_k = 0;
};

// Lists of that shape: batch * heads * query blocks. Throws invalid_argument for a shape that block lists
// cannot have.
FLASHJIT_API std::int64_t count_block_lists(const BlockSparseMask& mask, const BlockListShape& shape);

// Whether a row sees a key.
using SeesPair = std::function<bool(int batch, int head, int row, int key)>;

// From a dense mask, [batch, heads, seqlen_q, seqlen_k] bytes, row-major: not 0, seen.
FLASHJIT_API MaskTables block_sparse_from_dense(const BlockSparseMask& mask, const BlockListShape& shape,
                                                std::span<const std::uint8_t> seen);

// From compressed rows: list i of batch entry b and head h are columns[e] for e from offsets[j] to
// offsets[j + 1], j = (b * heads + h) * query blocks + i. Blocks are seen whole; lists may come in any order.
FLASHJIT_API MaskTables block_sparse_from_csr(const BlockSparseMask& mask, const BlockListShape& shape,
                                              std::span<const std::int32_t> offsets,
                                              std::span<const std::int32_t> columns);

// FlexAttention's BlockMask (PyTorch): counts are [batch, heads, query blocks], indices [batch, heads, query
// blocks, columns] with a list's entries first. Of the blocks of kv_indices a row sees the keys that `sees`
// says; without it all of them, for where other masks of the spec decide. Those of full_kv_indices are seen
// whole.
struct FlexBlockMask {
  std::span<const std::int32_t> kv_num_blocks, kv_indices;
  std::span<const std::int32_t> full_kv_num_blocks{}, full_kv_indices{};
};
FLASHJIT_API MaskTables block_sparse_from_flex(const BlockSparseMask& mask, const BlockListShape& shape,
                                               const FlexBlockMask& blocks, const SeesPair& sees = {});

// Rows see the keys of their own segment. segment_ids_q: [batch, seqlen_q], segment_ids_k: [batch, seqlen_k];
// any numbers in any order. With a causal mask beside it: packed documents.
FLASHJIT_API MaskTables document_mask(const BlockSparseMask& mask,
                                      std::span<const std::int32_t> segment_ids_q,
                                      std::span<const std::int32_t> segment_ids_k, int batch);

// parents: [batch, tokens]; -1 for a root. A parent comes before its children. Every row sees its ancestors
// and itself.
FLASHJIT_API MaskTables tree_from_parents(std::span<const std::int32_t> parents, int batch);

}  // namespace flashjit
