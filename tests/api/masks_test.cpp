// Mask tables built from the formats of applications: the
// pairs that they show, and the input that is refused.
#include "runtime/masks.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "runtime/flashjit.h"
#include "tests/unit/expect_error.h"
#include "tools/verify/mask.hpp"

namespace flashjit {
namespace {

constexpr BlockSparseMask mask{.block_m = 16, .block_n = 48};
constexpr BlockSparseMask mask_of_heads{.block_m = 16, .block_n = 48, .per_head = true};

AttentionArgs arguments(MaskTables& tables, const BlockListShape& shape, int heads) {
  AttentionArgs args;
  args.q = Tensor{.rank = 4, .shape = {shape.batch, shape.seqlen_q, heads, 8}};
  args.k = Tensor{.rank = 4, .shape = {shape.batch, shape.seqlen_k, heads, 8}};
  for (MaskTable& table : tables) args.*table.argument = table.view();
  return args;
}

// Compares every pair of row and key with `expected`.
void expect_sees(MaskTables tables, const Mask& kind, const BlockListShape& shape, const SeesPair& expected) {
  AttentionSpec spec{.head_dim = 8, .mask = {kind}};
  const AttentionArgs args = arguments(tables, shape, std::max(shape.heads, 1));
  for (const verify::Sequence& s : verify::sequences_of(spec, args))
    for (int h = 0; h < shape.heads; ++h)
      for (int row = 0; row < shape.seqlen_q; ++row)
        for (int key = 0; key < shape.seqlen_k; ++key)
          ASSERT_EQ(verify::sees(spec, args, s, h, row, key), expected(s.batch, h, row, key))
              << s.batch << ", " << h << ", " << row << ", " << key;
}

const MaskTable* find(const MaskTables& tables, std::optional<Tensor> AttentionArgs::* argument) {
  for (const MaskTable& table : tables)
    if (table.argument == argument) return &table;
  return nullptr;
}

TEST(Masks, FromDense) {
  std::mt19937 random(7);
  for (const BlockListShape& shape :
       {BlockListShape{2, 3, 50, 100}, {1, 1, 16, 48}, {1, 1, 1, 1}, {1, 1, 0, 9}}) {
    std::vector<std::uint8_t> seen(std::size_t(shape.batch) * shape.heads * shape.seqlen_q * shape.seqlen_k);
    const auto at = [&](int b, int h, int row, int key) {
      return ((std::size_t(b) * shape.heads + h) * shape.seqlen_q + row) * shape.seqlen_k + key;
    };
    // Some blocks see nothing, some everything.
    for (int b = 0; b < shape.batch; ++b)
      for (int h = 0; h < shape.heads; ++h)
        for (int row = 0; row < shape.seqlen_q; ++row)
          for (int key = 0; key < shape.seqlen_k; ++key) {
            const int kind = (row / 16 + key / 48 + h) % 3;
            seen[at(b, h, row, key)] = kind == 0 ? 0 : kind == 1 ? 255 : random() % 2;
          }
    const BlockSparseMask& of = shape.heads > 1 ? mask_of_heads : mask;
    expect_sees(block_sparse_from_dense(of, shape, seen), of, shape,
                [&](int b, int h, int row, int key) { return seen[at(b, h, row, key)] != 0; });
  }
  const MaskTables whole = block_sparse_from_dense(mask, {1, 1, 40, 60}, std::vector<std::uint8_t>(2400, 1));
  EXPECT_EQ(find(whole, &AttentionArgs::block_bitmasks), nullptr) << "blocks at the edge are whole, too";
  expect_error(ErrorCode::invalid_argument, {"dense mask", "2399", "2400"},
               [] { block_sparse_from_dense(mask, {1, 1, 40, 60}, std::vector<std::uint8_t>(2399)); });
  expect_error(ErrorCode::invalid_argument, {"2 heads", "per_head"},
               [] { block_sparse_from_dense(mask, {1, 2, 1, 1}, std::vector<std::uint8_t>(2)); });
  expect_error(ErrorCode::invalid_spec, {"block_m 20"},
               [] { block_sparse_from_dense({.block_m = 20}, {1, 1, 1, 1}, std::vector<std::uint8_t>(1)); });
}

TEST(Masks, FromCsr) {
  const BlockListShape shape{1, 1, 40, 140};  // 3 x 3 blocks
  const std::vector<std::int32_t> offsets = {0, 2, 2, 3}, columns = {2, 0, 1};
  expect_sees(block_sparse_from_csr(mask, shape, offsets, columns), mask, shape,
              [](int, int, int row, int key) {
                return row / 16 == 0 ? key / 48 != 1 : row / 16 == 2 && key / 48 == 1;
              });
  const auto refused = [&](std::vector<std::int32_t> o, std::vector<std::int32_t> c,
                           std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { block_sparse_from_csr(mask, shape, o, c); });
  };
  refused({0, 2, 2}, columns, {"offsets has 3 elements", "4"});
  refused({0, 2, 1, 3}, columns, {"list 1 goes from 2 to 1"});
  refused({0, 2, 2, 4}, columns, {"list 2", "the 3 columns"});
  refused(offsets, {2, 3, 1}, {"columns names block 3 in list 0", "0 to 2"});
  refused(offsets, {2, -1, 1}, {"block -1"});
  refused(offsets, {2, 2, 1}, {"list 0 names block 2 twice"});
}

TEST(Masks, FromFlex) {
  const BlockListShape shape{1, 2, 20, 140};  // per head 2 x 3 blocks
  const std::vector<std::int32_t> counts = {1, 2, 0, 3}, indices = {1, 9, 9, 2, 0, 9, 9, 9, 9, 0, 1, 2},
                                  full_counts = {1, 0, 2, 0}, full_indices = {0, 9, 9, 9, 2, 1, 9, 9};
  const auto partial = [&](int h, int i, int j) {
    const int list = h * 2 + i;
    return std::find(&indices[list * 3], &indices[list * 3] + counts[list], j) !=
           &indices[list * 3] + counts[list];
  };
  const auto full = [&](int h, int i, int j) {
    const int list = h * 2 + i;
    return std::find(&full_indices[list * 2], &full_indices[list * 2] + full_counts[list], j) !=
           &full_indices[list * 2] + full_counts[list];
  };
  const FlexBlockMask blocks{counts, indices, full_counts, full_indices};
  const SeesPair odd = [](int, int h, int row, int key) { return (row + key + h) % 2 == 1; };
  expect_sees(block_sparse_from_flex(mask_of_heads, shape, blocks, odd), mask_of_heads, shape,
              [&](int b, int h, int row, int key) {
                const int i = row / 16, j = key / 48;
                return full(h, i, j) || (partial(h, i, j) && odd(b, h, row, key));
              });
  expect_sees(block_sparse_from_flex(mask_of_heads, shape, blocks), mask_of_heads, shape,
              [&](int, int h, int row, int key) {
                return full(h, row / 16, key / 48) || partial(h, row / 16, key / 48);
              });
  const auto refused = [&](const FlexBlockMask& bad, std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts,
                 [&] { block_sparse_from_flex(mask_of_heads, shape, bad, odd); });
  };
  const std::vector<std::int32_t> too_many = {1, 4, 0, 3}, clash = {1, 9, 2, 9, 2, 1, 9, 9},
                                  ones = {1, 1, 1, 1};
  refused({too_many, indices, full_counts, full_indices},
          {"kv_indices", "list 1 has 4 blocks", "room for 3"});
  refused({counts, std::vector<std::int32_t>(13), full_counts, full_indices}, {"kv_indices has 13"});
  refused({std::vector<std::int32_t>(3), indices}, {"kv_num_blocks has 3", "4"});
  refused({counts, indices, ones, clash}, {"list 0 names block 1 twice"});
}

TEST(Masks, Documents) {
  std::vector<std::int32_t> q, k;
  const BlockListShape shape{2, 1, 100, 130};
  for (int i = 0; i < 200; ++i) q.push_back(i % 100 / 32 + 10 * (i / 100));
  for (int i = 0; i < 260; ++i) k.push_back(i % 130 / 40 + 10 * (i / 130));
  expect_sees(document_mask(mask, q, k, 2), mask, shape,
              [&](int b, int, int row, int key) { return q[b * 100 + row] == k[b * 130 + key]; });
  for (int i = 0; i < 200; ++i) q[i] = i % 3;  // scattered segments
  for (int i = 0; i < 260; ++i) k[i] = i % 5;
  expect_sees(document_mask(mask, q, k, 2), mask, shape,
              [&](int b, int, int row, int key) { return q[b * 100 + row] == k[b * 130 + key]; });
  expect_error(ErrorCode::invalid_argument, {"segment ids", "200 and 260", "batch 3"},
               [&] { document_mask(mask, q, k, 3); });
}

// The memory behind these sizes is never read.
TEST(Masks, OfMoreThanCanBeCounted) {
  constexpr int largest = std::numeric_limits<int>::max(), longest = longest_sequence;
  const std::vector<std::uint8_t> bytes(1);
  const std::vector<std::int32_t> words(2);
  const auto refused = [](std::initializer_list<const char*> parts, const auto& make) {
    expect_error(ErrorCode::invalid_argument, parts, make);
  };
  for (const BlockListShape& shape : {BlockListShape{1, 1, largest, 1}, {1, 1, 1, largest}}) {
    refused({"2147483647", "1073741824"}, [&] { block_sparse_from_dense(mask, shape, bytes); });
    refused({"2147483647", "1073741824"}, [&] { block_sparse_from_csr(mask, shape, words, words); });
    refused({"2147483647", "1073741824"}, [&] { block_sparse_from_flex(mask, shape, {words, words}); });
  }
  // Tables of lists, and dense masks of 2^60 and 2^64 pairs, whose product wraps to 0.
  refused({"offsets"}, [&] { block_sparse_from_csr(mask, {largest, 1, longest, 1}, words, words); });
  refused({"offsets"}, [&] { block_sparse_from_csr(mask_of_heads, {largest, largest, 0, 0}, {}, {}); });
  refused({"the dense mask has 1", "1152921504606846976"},
          [&] { block_sparse_from_dense(mask, {1, 1, longest, longest}, bytes); });
  refused({"the dense mask", "64 bits"},
          [&] { block_sparse_from_dense(mask_of_heads, {4, 4, longest, longest}, {}); });
  EXPECT_EQ(count_block_lists(mask, {1, 1, longest, longest}), longest / 16);
  EXPECT_EQ(count_block_lists(mask_of_heads, {0, largest, longest, longest}), 0);

  const std::span<const std::int32_t> many(words.data(), std::size_t{1} << 31);
  refused({"segment_ids_q", "2147483648 tokens"}, [&] { document_mask(mask, many, words, 1); });
  refused({"segment_ids_k", "2147483648 tokens"}, [&] { document_mask(mask, words, many, 1); });
  refused({"parents", "2147483648 tokens"}, [&] { tree_from_parents(many, 1); });
  refused({"2 x 1073741824 tokens", "words"}, [&] { tree_from_parents(many, 2); });

  const auto refused_in_c = [&](flashjit_block_lists lists, const char* part) {
    flashjit_tables* tables = nullptr;
    const std::int32_t* const w = words.data();
    EXPECT_EQ(flashjit_block_sparse_from_dense(&lists, bytes.data(), &tables), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_THAT(flashjit_last_error_message(), testing::HasSubstr(part));
    EXPECT_EQ(flashjit_block_sparse_from_csr(&lists, w, w, &tables), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_EQ(flashjit_block_sparse_from_flex(&lists, largest, w, w, w, w, &tables),
              FLASHJIT_INVALID_ARGUMENT);
    EXPECT_EQ(flashjit_document_mask(&lists, w, w, &tables), FLASHJIT_INVALID_ARGUMENT);
    EXPECT_EQ(tables, nullptr);
  };
  refused_in_c({16, 48, 0, 1, 1, largest, largest}, "1073741824");
  refused_in_c({16, 48, 1, largest, largest, longest, longest}, "offsets");
  refused_in_c({16, 48, 0, largest, 1, longest, longest}, "offsets");
}

TEST(Masks, Trees) {
  // A worked example with nine tokens, and a chain followed by a second root.
  const std::vector<std::int32_t> parents = {-1, 0, 1, 1, 2, 2, 3, 3, 4, -1, 0, 1, 2, 3, 4, 5, 6, -1};
  MaskTables tables = tree_from_parents(parents, 2);
  const AttentionSpec spec{.head_dim = 8, .mask = {TreeMask{}}};
  const AttentionArgs args = arguments(tables, {2, 1, 9, 15}, 1);
  const auto seen = [&](int b, int row) {
    std::vector<int> keys;
    const verify::Sequence s = verify::sequences_of(spec, args)[b];
    for (int key = 0; key < 15; ++key)
      if (verify::sees(spec, args, s, 0, row, key)) keys.push_back(key - 6);
    return keys;
  };
  EXPECT_EQ(seen(0, 8), (std::vector<int>{-6, -5, -4, -3, -2, -1, 0, 1, 2, 4, 8}));
  EXPECT_EQ(seen(0, 7), (std::vector<int>{-6, -5, -4, -3, -2, -1, 0, 1, 3, 7}));
  EXPECT_EQ(seen(1, 8), (std::vector<int>{-6, -5, -4, -3, -2, -1, 8}));
  EXPECT_EQ(seen(1, 3), (std::vector<int>{-6, -5, -4, -3, -2, -1, 0, 1, 2, 3}));

  const auto refused = [](std::vector<std::int32_t> bad, std::initializer_list<const char*> parts) {
    expect_error(ErrorCode::invalid_argument, parts, [&] { tree_from_parents(bad, 1); });
  };
  refused({-1, 2, 1}, {"parents[0, 1] is 2", "a token after it"});
  refused({-1, 0, 2}, {"parents[0, 2] is 2", "the token itself"});
  refused({-1, 7}, {"parents[0, 1] is 7", "no token"});
  refused({-2}, {"parents[0, 0] is -2", "no token"});
  expect_error(ErrorCode::invalid_argument, {"no multiple of batch 2"},
               [] { tree_from_parents(std::vector<std::int32_t>{-1, 0, 1}, 2); });
}

}  // namespace
}  // namespace flashjit
