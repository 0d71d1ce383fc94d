// Every mask and every sensible composition, against the float64 oracle's own definition of the masks.
#include <gtest/gtest.h>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class Masks : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }

  // Lengths on both sides of the edges of tiles and blocks;
  // every seed draws other lengths, sizes, lists and trees.
  void expect_everywhere(const std::vector<Mask>& masks, bool per_head = false) {
    std::uint64_t seed = 1;
    for (const DType dtype : on().dtypes()) {
      const AttentionSpec spec = forward_spec(dtype, 64, masks, {.lse = dtype != DType::fp16});
      seed += 16;
      if (!takes_next(spec)) continue;
      std::uint64_t of_sizes = seed;
      for (const auto& [rows, keys] :
           {std::pair{1, 1}, std::pair{1, 300}, std::pair{17, 64}, std::pair{64, 17}, std::pair{130, 130},
            std::pair{129, 257}, std::pair{200, 70}, std::pair{333, 400}}) {
        for (int repeat = 0; repeat < 2; ++repeat)
          expect({.spec = spec,
                  .batch = 3,
                  .heads_q = per_head ? 4 : 2,
                  .heads_kv = 2,
                  .seqlen_q = rows,
                  .seqlen_k = keys,
                  .poison = repeat % 2 ? Poison::infinity : Poison::nan,
                  .seed = ++of_sizes});
      }
      expect({.spec = spec, .batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 40, .seqlen_k = 0});
      expect({.spec = spec, .batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 0, .seqlen_k = 40});
      expect({.spec = spec, .batch = 0, .heads_q = 2, .heads_kv = 1, .seqlen_q = 4, .seqlen_k = 4});
    }
  }
};

TEST_P(Masks, SlidingWindow) {
  expect_everywhere({SlidingWindowMask{bottom_right}});
  expect_everywhere({SlidingWindowMask{top_left}});
}
TEST_P(Masks, SlidingWindowWithSinks) {
  expect_everywhere({SlidingWindowMask{bottom_right, true}});
  expect_everywhere({SlidingWindowMask{top_left, true}});
}
TEST_P(Masks, Padding) {
  expect_everywhere({PaddingMask{}});
}
TEST_P(Masks, BlockSparse) {
  expect_everywhere({BlockSparseMask{64, 64}});
  expect_everywhere({BlockSparseMask{128, 128}});
  expect_everywhere({BlockSparseMask{16, 16}});
  expect_everywhere({BlockSparseMask{256, 48}});
  expect_everywhere({BlockSparseMask{80, 256}});
}
TEST_P(Masks, BlockSparsePerHead) {
  expect_everywhere({BlockSparseMask{64, 128, true}}, true);
}
TEST_P(Masks, Tree) {
  expect_everywhere({TreeMask{}});
}

TEST_P(Masks, Compositions) {
  const std::vector<std::vector<Mask>> compositions = {
      {CausalMask{}, PaddingMask{}},
      {CausalMask{top_left}, PaddingMask{}},
      {CausalMask{}, SlidingWindowMask{}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}},
      {SlidingWindowMask{}, PaddingMask{}},
      {SlidingWindowMask{bottom_right, true}, PaddingMask{}},
      {CausalMask{}, BlockSparseMask{64, 128}},
      {BlockSparseMask{128, 64}, PaddingMask{}},
      {SlidingWindowMask{}, BlockSparseMask{32, 32}},
      {SlidingWindowMask{top_left, true}, BlockSparseMask{64, 64}},
      {TreeMask{}, PaddingMask{}},
      {TreeMask{}, CausalMask{}},
      {TreeMask{}, BlockSparseMask{64, 64, true}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}, PaddingMask{}, BlockSparseMask{64, 64}},
      {CausalMask{}, PaddingMask{}, BlockSparseMask{64, 64}, TreeMask{}},
  };
  std::uint64_t seed = 100;
  for (const auto& masks : compositions) {
    const std::vector<DType> dtypes = on().dtypes();
    const AttentionSpec spec = forward_spec(dtypes[seed % dtypes.size()], 64, masks);
    seed += 10;  // no multiple of the number of dtypes
    if (!takes_next(spec)) continue;
    std::uint64_t of_sizes = seed;
    for (const auto& [rows, keys] : {std::pair{70, 300}, std::pair{260, 190}, std::pair{150, 150}})
      for (int repeat = 0; repeat < 3; ++repeat)
        expect({.spec = spec,
                .batch = 3,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .layout_kv = MemoryLayout::padded,
                .seed = ++of_sizes});
  }
}

TEST_P(Masks, OnPackedSequences) {
  std::uint64_t seed = 200;
  for (const auto& masks : std::vector<std::vector<Mask>>{{SlidingWindowMask{}},
                                                          {SlidingWindowMask{bottom_right, true}},
                                                          {BlockSparseMask{64, 64}},
                                                          {CausalMask{}, BlockSparseMask{32, 64, true}},
                                                          {TreeMask{}}}) {
    const AttentionSpec spec = forward_spec(DType::bf16, 64, masks, {.varlen = true});
    seed += 4;
    if (!takes_next(spec)) continue;
    std::uint64_t of_lengths = seed;
    for (int repeat = 0; repeat < 4; ++repeat)
      expect({.spec = spec,
              .heads_q = 4,
              .heads_kv = 2,
              .lengths_q = {0, 5, 300, 1, 64, 65, 0},
              .lengths_k = {7, 5, 260, 130, 0, 64, 0},
              .spare_rows = repeat % 2 ? 130 : 0,
              .seed = ++of_lengths});
  }
}

FLASHJIT_ON_EVERY_DEVICE(Masks);

}  // namespace
}  // namespace flashjit::testing_support
