#include "runtime/masks.hpp"

#include <algorithm>
#include <climits>
#include <optional>
#include <string>
#include <utility>

#include "codegen/spec/mask_rules.hpp"
#include "runtime/arguments/checks.hpp"
#include "templates/shared/platform.h"

namespace flashjit {
namespace {

// The most elements of an int32 table, since offsets into it are int32, too.
constexpr std::int64_t most_elements = INT_MAX;

void require_size(const char* name, std::size_t size, std::optional<std::int64_t> expected,
                  const char* what) {
  if (!expected) refuse_argument(name, " would have more elements than 64 bits count: ", what);
  if (size != static_cast<std::size_t>(*expected))
    refuse_argument(name, " has ", size, " elements, it must have ", *expected, ", ", what);
}

// The length of each of `batch` sequences that have so many elements together.
int length_of(const char* name, std::size_t elements, int batch) {
  const std::size_t length = elements / static_cast<std::size_t>(batch);
  if (length > longest_sequence)
    refuse_argument(name, " are of ", length, " tokens, a sequence has at most ", longest_sequence);
  return static_cast<int>(length);
}

int blocks_of(int length, int size) {
  return device::ceil_div(length, size);
}

// Makes the tables of block lists, block after block, in the
// order of batch entries, heads, query blocks and key blocks.
class Lister {
 public:
  Lister(const BlockSparseMask& mask, const BlockListShape& shape)
      : lists(count_block_lists(mask, shape)),
        row_blocks(blocks_of(shape.seqlen_q, mask.block_m)),
        key_blocks(blocks_of(shape.seqlen_k, mask.block_n)),
        mask_(mask),
        shape_(shape),
        words_(device::ceil_div(mask.block_n, 32)) {}

  const std::int64_t lists;
  const int row_blocks, key_blocks;

  // Calls list(batch, head, query block) for every list; it must add the list's blocks in ascending order.
  template <class List>
  MaskTables make(List&& list) {
    for (int b = 0; shape_.heads > 0 && b < shape_.batch; ++b) {
      for (int h = 0; h < shape_.heads; ++h) {
        offsets_.push_back(static_cast<std::int32_t>(indices_.size()));
        for (int i = 0; i < row_blocks; ++i) {
          list(b, h, i);
          offsets_.push_back(static_cast<std::int32_t>(indices_.size()));
        }
      }
    }
    const auto listed = static_cast<std::int64_t>(indices_.size());
    const std::int64_t bitmasks = static_cast<std::int64_t>(bitmasks_.size()) / (mask_.block_m * words_);
    MaskTables tables;
    tables.push_back(
        {&AttentionArgs::block_offsets, {shape_.batch, shape_.heads, row_blocks + 1}, std::move(offsets_)});
    tables.push_back({&AttentionArgs::block_indices, {listed}, std::move(indices_)});
    if (bitmasks == 0) return tables;
    tables.push_back({&AttentionArgs::block_bitmask_of, {listed}, std::move(bitmask_of_)});
    tables.push_back(
        {&AttentionArgs::block_bitmasks, {bitmasks, mask_.block_m, words_}, std::move(bitmasks_)});
    return tables;
  }

  void add_whole(int block) { list(block, -1); }

  // Adds a block whole, with a bitmask or not at all, depending on sees(row, key).
  template <class Sees>
  void add(int row_block, int block, Sees&& sees) {
    const int first_row = row_block * mask_.block_m, first_key = block * mask_.block_n;
    const int rows = std::min(mask_.block_m, shape_.seqlen_q - first_row);
    const int keys = std::min(mask_.block_n, shape_.seqlen_k - first_key);
    bits_.assign(static_cast<std::size_t>(mask_.block_m) * words_, 0);
    std::int64_t count = 0;
    for (int row = 0; row < rows; ++row) {
      for (int key = 0; key < keys; ++key) {
        if (!sees(first_row + row, first_key + key)) continue;
        bits_[static_cast<std::size_t>(row) * words_ + key / 32] |= 1u << key % 32;
        ++count;
      }
    }
    if (count == 0) return;
    if (count == std::int64_t{rows} * keys) return add_whole(block);
    list(block, static_cast<std::int32_t>(bitmasks_.size() / bits_.size()));
    bitmasks_.insert(bitmasks_.end(), bits_.begin(), bits_.end());
  }

 private:
  void list(int block, std::int32_t bitmask) {
    if (indices_.size() == most_elements)
      refuse_argument("the lists name more than ", most_elements,
                      " blocks; larger blocks, or a part of the batch, would work");
    indices_.push_back(block);
    bitmask_of_.push_back(bitmask);
  }

  BlockSparseMask mask_;
  BlockListShape shape_;
  int words_;
  std::vector<std::uint32_t> bits_;
  std::vector<std::int32_t> offsets_, indices_, bitmask_of_, bitmasks_;
};

// The blocks of one list, sorted; each is a key block and whether it is seen whole.
using ListedBlocks = std::vector<std::pair<std::int32_t, bool>>;

void append(ListedBlocks& listed, std::span<const std::int32_t> blocks, bool whole, const char* name,
            std::int64_t list, int key_blocks) {
  for (const std::int32_t block : blocks) {
    if (block < 0 || block >= key_blocks)
      refuse_argument(name, " names block ", block, " in list ", list, "; key blocks are 0 to ",
                      key_blocks - 1);
    listed.emplace_back(block, whole);
  }
}

void sort(ListedBlocks& listed, std::int64_t list) {
  std::sort(listed.begin(), listed.end());
  const auto twice = std::adjacent_find(listed.begin(), listed.end(),
                                        [](const auto& a, const auto& b) { return a.first == b.first; });
  if (twice != listed.end())
    refuse_argument("list ", list, " names block ", twice->first, " twice; once would work");
}

// The only value of `ids`, if all are equal.
std::optional<std::int32_t> only(std::span<const std::int32_t> ids) {
  const bool same = std::all_of(ids.begin(), ids.end(), [&](std::int32_t id) { return id == ids[0]; });
  return same ? std::optional(ids[0]) : std::nullopt;
}

}  // namespace

std::int64_t count_block_lists(const BlockSparseMask& mask, const BlockListShape& shape) {
  BlockSparseMask alone = mask;
  alone.of_masks = false;
  check_values(alone);
  if (shape.batch < 0 || shape.heads < 0 || shape.seqlen_q < 0 || shape.seqlen_k < 0)
    refuse_argument("the shape of a block list has a negative size");
  if (shape.heads != 1 && !mask.per_head)
    refuse_argument("the shape has ", shape.heads,
                    " heads, but the mask has per_head false: 1 head, or per_head true, would work");
  for (const int length : {shape.seqlen_q, shape.seqlen_k})
    if (length > longest_sequence)
      refuse_argument("the shape of a block list has a length of ", length, ", a sequence has at most ",
                      longest_sequence, " rows");
  const std::int64_t of_head = blocks_of(shape.seqlen_q, mask.block_m);
  const auto offsets = product_of({shape.batch, shape.heads, of_head + 1});
  if (!offsets || *offsets > most_elements)
    refuse_argument("batch ", shape.batch, " x heads ", shape.heads, " x ", of_head,
                    " query blocks and one: more than ", most_elements,
                    " offsets; larger blocks, or a part of the batch, would work");
  return *offsets - std::int64_t{shape.batch} * shape.heads;
}

std::int64_t most_listed_blocks(const BlockSparseMask& mask, const BlockListShape& shape) {
  const std::int64_t lists = count_block_lists(mask, shape),
                     of_list = blocks_of(shape.seqlen_k, mask.block_n);
  const auto most = product_of({lists, of_list});
  if (!most || *most > most_elements)
    refuse_argument(lists, " lists of ", of_list, " key blocks each are more than ", most_elements,
                    " blocks; larger blocks, or a part of the batch, would work");
  return *most;
}

MaskTables block_sparse_from_dense(const BlockSparseMask& mask, const BlockListShape& shape,
                                   std::span<const std::uint8_t> seen) {
  Lister lister(mask, shape);
  const std::int64_t of_head = std::int64_t{shape.seqlen_q} * shape.seqlen_k;
  require_size("the dense mask", seen.size(), product_of({shape.batch, shape.heads, of_head}),
               "batch x heads x seqlen_q x seqlen_k");
  return lister.make([&](int b, int h, int i) {
    const std::uint8_t* const dense = seen.data() + (std::int64_t{b} * shape.heads + h) * of_head;
    for (int j = 0; j < lister.key_blocks; ++j)
      lister.add(i, j,
                 [&](int row, int key) { return dense[std::int64_t{row} * shape.seqlen_k + key] != 0; });
  });
}

MaskTables block_sparse_from_csr(const BlockSparseMask& mask, const BlockListShape& shape,
                                 std::span<const std::int32_t> offsets,
                                 std::span<const std::int32_t> columns) {
  Lister lister(mask, shape);
  require_size("offsets", offsets.size(), lister.lists + 1, "one more than the lists");
  std::int64_t list = 0;
  ListedBlocks listed;
  return lister.make([&](int, int, int) {
    const std::int32_t begin = offsets[list], end = offsets[list + 1];
    if (begin < 0 || end < begin || end > static_cast<std::int64_t>(columns.size()))
      refuse_argument("offsets: list ", list, " goes from ", begin, " to ", end,
                      "; they ascend from 0 to the ", columns.size(), " columns");
    listed.clear();
    append(listed, columns.subspan(begin, end - begin), true, "columns", list, lister.key_blocks);
    sort(listed, list);
    for (const auto& [block, whole] : listed) lister.add_whole(block);
    ++list;
  });
}

MaskTables block_sparse_from_flex(const BlockSparseMask& mask, const BlockListShape& shape,
                                  const FlexBlockMask& blocks, const SeesPair& sees) {
  Lister lister(mask, shape);
  const std::int64_t lists = lister.lists;
  const auto check = [&](const char* counts_name, std::span<const std::int32_t> counts,
                         const char* indices_name, std::span<const std::int32_t> indices) -> std::int64_t {
    require_size(counts_name, counts.size(), lists, "batch x heads x query blocks");
    if (lists == 0) return 0;
    if (static_cast<std::int64_t>(indices.size()) % lists != 0)
      refuse_argument(indices_name, " has ", indices.size(), " elements, which is no multiple of the ", lists,
                      " lists");
    return static_cast<std::int64_t>(indices.size()) / lists;
  };
  const std::int64_t columns = check("kv_num_blocks", blocks.kv_num_blocks, "kv_indices", blocks.kv_indices);
  const bool has_full = !blocks.full_kv_num_blocks.empty();
  const std::int64_t full_columns = has_full ? check("full_kv_num_blocks", blocks.full_kv_num_blocks,
                                                     "full_kv_indices", blocks.full_kv_indices)
                                             : 0;
  std::int64_t list = 0;
  ListedBlocks listed;
  const auto take = [&](std::span<const std::int32_t> counts, std::span<const std::int32_t> indices,
                        std::int64_t width, bool whole, const char* name) {
    if (counts[list] < 0 || counts[list] > width)
      refuse_argument(name, ": list ", list, " has ", counts[list], " blocks; there is room for ", width);
    append(listed, indices.subspan(list * width, counts[list]), whole, name, list, lister.key_blocks);
  };
  return lister.make([&](int b, int h, int i) {
    listed.clear();
    take(blocks.kv_num_blocks, blocks.kv_indices, columns, !sees, "kv_indices");
    if (has_full)
      take(blocks.full_kv_num_blocks, blocks.full_kv_indices, full_columns, true, "full_kv_indices");
    sort(listed, list);
    for (const auto& [block, whole] : listed) {
      if (whole) {
        lister.add_whole(block);
      } else {
        lister.add(i, block, [&](int row, int key) { return sees(b, h, row, key); });
      }
    }
    ++list;
  });
}

MaskTables document_mask(const BlockSparseMask& mask, std::span<const std::int32_t> segment_ids_q,
                         std::span<const std::int32_t> segment_ids_k, int batch) {
  if (batch < 1) refuse_argument("batch is ", batch, ", it must be at least 1");
  if (segment_ids_q.size() % batch != 0 || segment_ids_k.size() % batch != 0)
    refuse_argument("segment ids are [batch, seqlen]: ", segment_ids_q.size(), " and ", segment_ids_k.size(),
                    " of them are no multiples of batch ", batch);
  const BlockListShape shape{.batch = batch,
                             .heads = 1,
                             .seqlen_q = length_of("segment_ids_q", segment_ids_q.size(), batch),
                             .seqlen_k = length_of("segment_ids_k", segment_ids_k.size(), batch)};
  Lister lister(mask, shape);
  const auto part = [](std::span<const std::int32_t> ids, int block, int size) {
    const std::size_t begin = static_cast<std::size_t>(block) * size;
    return ids.subspan(begin, std::min<std::size_t>(size, ids.size() - begin));
  };
  return lister.make([&](int b, int, int i) {
    const auto of_rows = segment_ids_q.subspan(std::size_t(b) * shape.seqlen_q, shape.seqlen_q);
    const auto of_keys = segment_ids_k.subspan(std::size_t(b) * shape.seqlen_k, shape.seqlen_k);
    const auto rows = only(part(of_rows, i, mask.block_m));
    for (int j = 0; j < lister.key_blocks; ++j) {
      const auto keys = only(part(of_keys, j, mask.block_n));
      if (rows && keys) {  // most blocks; decides them without looking at every pair
        if (*rows == *keys) lister.add_whole(j);
      } else {
        lister.add(i, j, [&](int row, int key) { return of_rows[row] == of_keys[key]; });
      }
    }
  });
}

MaskTables tree_from_parents(std::span<const std::int32_t> parents, int batch) {
  if (batch < 1 || parents.size() % batch != 0)
    refuse_argument("parents are [batch, tokens]: ", parents.size(), " of them are no multiple of batch ",
                    batch);
  const int tokens = length_of("parents", parents.size(), batch), words = device::ceil_div(tokens, 32);
  const auto elements = product_of({batch, tokens, words});
  if (!elements || *elements > most_elements)
    refuse_argument("batch ", batch, " x ", tokens, " tokens with ", words, " words of bits each: more than ",
                    most_elements, " words; smaller trees, or a part of the batch, would work");
  std::vector<std::int32_t> bits(static_cast<std::size_t>(*elements));
  for (int b = 0; tokens > 0 && b < batch; ++b) {
    std::int32_t* const tree = bits.data() + std::size_t(b) * tokens * words;
    for (int i = 0; i < tokens; ++i) {
      const std::int32_t parent = parents[std::size_t(b) * tokens + i];
      if (parent < -1 || parent >= i)
        refuse_argument("parents[", b, ", ", i, "] is ", parent,
                        (parent >= tokens || parent < -1 ? ", which is no token"
                         : parent == i                   ? ", the token itself"
                                                         : ", a token after it"),
                        ": a parent comes before its children, and a root's is -1");
      std::int32_t* const row = tree + std::size_t(i) * words;
      if (parent >= 0) std::copy_n(tree + std::size_t(parent) * words, words, row);
      row[i / 32] |= static_cast<std::int32_t>(1u << i % 32);
    }
  }
  MaskTables tables;
  tables.push_back({&AttentionArgs::tree_bits, {batch, tokens, words}, std::move(bits)});
  return tables;
}

}  // namespace flashjit
