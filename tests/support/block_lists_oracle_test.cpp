// The oracle of make_block_lists: an example by hand, and defects that it catches.
#include "tools/verify/block_lists_oracle.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tools/verify/report.hpp"

namespace flashjit::verify {
namespace {

// 40 rows and 70 keys, causal, in blocks of 16 x 32: query blocks end at positions 45, 61 and 69.
TEST(BlockListsOracle, Causal) {
  const AttentionSpec spec =
      AttentionSpec{.op = Operation::make_block_lists,
                    .head_dim = 16,
                    .mask = {CausalMask{}, BlockSparseMask{.block_m = 16, .block_n = 32, .of_masks = true}}}
          .validated();
  std::vector<std::int32_t> offsets(4, 99), indices(9, 99), bitmask_of(9, 99);
  const auto ints = [](std::vector<std::int32_t>& data, std::initializer_list<std::int64_t> sizes) {
    return Tensor::contiguous(data.data(), DType::int32, {}, sizes);
  };
  AttentionArgs args;
  args.q = Tensor::contiguous(nullptr, DType::bf16, {}, {1, 40, 1, 16});
  args.k = Tensor::contiguous(nullptr, DType::bf16, {}, {1, 70, 1, 16});
  args.block_offsets = ints(offsets, {1, 1, 4});
  args.block_indices = ints(indices, {9});
  args.block_bitmask_of = ints(bitmask_of, {9});
  fill_block_lists(spec, args);
  EXPECT_EQ(offsets, (std::vector<std::int32_t>{0, 2, 4, 7}));
  EXPECT_EQ(indices, (std::vector<std::int32_t>{0, 1, 0, 1, 0, 1, 2, 99, 99}));
  // The first row is at position 30 and does not see key 31, the last of block 0. Block 1 ends at key 63.
  EXPECT_EQ(bitmask_of, (std::vector<std::int32_t>{-2, -2, -1, -2, -1, -2, -2, 99, 99}));
  EXPECT_TRUE(verify_outputs(spec, args).ok());
  for (std::vector<std::int32_t>* table : {&offsets, &indices, &bitmask_of})
    for (const std::size_t at : {0, 2}) {
      ++(*table)[at];
      EXPECT_EQ(verify_outputs(spec, args).wrong, 1);
      --(*table)[at];
    }
  // The first block that is kept in part gets the only bitmask.
  std::vector<std::int32_t> bitmasks(16, 99);
  args.block_bitmasks = ints(bitmasks, {1, 16, 1});
  fill_block_lists(spec, args);
  EXPECT_EQ(bitmask_of, (std::vector<std::int32_t>{0, -2, -1, -2, -1, -2, -2, 99, 99}));
  std::vector<std::int32_t> expected(16, -1);
  expected[0] = 0x7fffffff;
  EXPECT_EQ(bitmasks, expected);
  bitmasks[7] ^= 1;
  EXPECT_EQ(verify_outputs(spec, args).wrong, 1);
}

}  // namespace
}  // namespace flashjit::verify
