// The forward with K and V in pages, against the float64 oracle: page sizes, layouts, lengths, masks, packed
// rows and heads. Stale slots and pages that nobody has hold poison; page ids that nobody may use, anything.
#include <gtest/gtest.h>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class PagedForward : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }

  // Keys and values of an 8-bit dtype, with each sharing of scales.
  void expect_8bit(DType kv_dtype, std::uint64_t seed) {
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
      for (const auto& [dim, dim_v] : {std::pair{64, 64}, {128, 128}, {80, 40}, {24, 256}})
        for (const auto& masks : std::vector<std::vector<Mask>>{{CausalMask{}},
                                                                {PaddingMask{}},
                                                                {SlidingWindowMask{bottom_right, true}},
                                                                {BlockSparseMask{64, 32, true}},
                                                                {TreeMask{}}}) {
          ++seed;
          const AttentionSpec spec = forward_spec(seed % 2 ? DType::bf16 : DType::fp16, dim, masks,
                                                  {.head_dim_v = dim_v,
                                                   .varlen = seed % 3 == 0 && masks.front().index() == 0,
                                                   .paged = true,
                                                   .kv_dtype = kv_dtype,
                                                   .kv_scale = kv_scale});
          if (!takes_next(spec)) continue;
          Case c{.spec = spec,
                 .batch = 3,
                 .heads_q = 6,
                 .heads_kv = 2,
                 .seqlen_q = seed % 7 == 0 ? 1 : 150,
                 .seqlen_k = 300,
                 .lengths_k = {300, 37, 170},
                 .page_size = seed % 5 == 0 ? 1 : 16 << seed % 3,
                 .layout_kv = static_cast<MemoryLayout>(seed % 4),
                 .poison = seed % 2 ? Poison::nan : Poison::infinity,
                 .seed = seed};
          // Rows of 24 or 40 bytes begin at multiples of 16 only with gaps between them.
          if (on().is_cuda() && (dim % 16 || dim_v % 16)) c.layout_kv = MemoryLayout::padded;
          if (spec.varlen) c.lengths_q = {1, 150, 77};
          expect(c);
        }
  }
};

TEST_P(PagedForward, PageSizesAndLayouts) {
  std::uint64_t seed = 0;
  for (const DType dtype : on().dtypes()) {
    const AttentionSpec spec = forward_spec(dtype, 64, {CausalMask{}}, {.paged = true});
    if (!takes_next(spec)) continue;
    for (const int page_size : {1, 2, 16, 48, 64, 256, 512})
      for (const MemoryLayout layout :
           {MemoryLayout::contiguous, MemoryLayout::heads_first, MemoryLayout::padded})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = page_size == 16 ? 200 : 70,
                .seqlen_k = 300,
                .page_size = page_size,
                .layout = layout,
                .layout_kv = layout,
                .poison = seed % 2 ? Poison::nan : Poison::infinity,
                .seed = ++seed});
  }
}

TEST_P(PagedForward, HeadDims) {
  std::uint64_t seed = 100;
  for (const DType dtype : on().dtypes())
    for (const auto& [dim, dim_v] :
         {std::pair{8, 16}, {40, 24}, {64, 128}, {96, 96}, {120, 8}, {128, 128}, {192, 128}, {256, 256}}) {
      const AttentionSpec spec =
          forward_spec(dtype, dim, {}, {.head_dim_v = dim_v, .lse = dim != 96, .paged = true});
      seed += 3;
      if (!takes_next(spec)) continue;
      for (const int page_size : {16, 64})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 2,
                .seqlen_q = 90,
                .seqlen_k = 333,
                .lengths_k = {333, 141},
                .page_size = page_size,
                .seed = seed});
    }
}

TEST_P(PagedForward, LengthsThatDiffer) {
  std::uint64_t seed = 200;
  for (const DType dtype : on().dtypes()) {
    const AttentionSpec spec = forward_spec(dtype, 128, {CausalMask{}}, {.paged = true});
    if (!takes_next(spec)) continue;
    for (const int page_size : {1, 16, 256})
      for (const int rows : {1, 100})
        expect({.spec = spec,
                .batch = 7,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = 1024,
                .lengths_k = {0, 1024, 1, 3, 512, 65, 700},
                .page_size = page_size,
                .seed = ++seed});
  }
}

// Random windows, lists and trees; lengths of keys, and of rows with padding.
TEST_P(PagedForward, Masks) {
  const std::vector<std::vector<Mask>> lists = {
      {CausalMask{top_left}},
      {PaddingMask{}},
      {CausalMask{}, PaddingMask{}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{bottom_right, true}},
      {SlidingWindowMask{top_left, true}, PaddingMask{}},
      {TreeMask{}},
      {CausalMask{}, TreeMask{}},
      {BlockSparseMask{64, 64, true}},
      {SlidingWindowMask{bottom_right, true}, BlockSparseMask{16, 32}},
      {CausalMask{}, PaddingMask{}, BlockSparseMask{48, 80}},
  };
  std::uint64_t seed = 300;
  for (const auto& masks : lists) {
    const std::vector<DType> dtypes = on().dtypes();
    const AttentionSpec spec = forward_spec(dtypes[seed++ % dtypes.size()], 64, masks, {.paged = true});
    if (!takes_next(spec)) continue;
    std::uint64_t of_sizes = 10 * seed;
    for (const auto& [rows, keys] : {std::pair{1, 300}, {130, 700}, {300, 300}})
      for (int repeat = 0; repeat < 3; ++repeat)
        expect({.spec = spec,
                .batch = 3,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .page_size = 16 << 2 * repeat,
                .poison = repeat % 2 ? Poison::infinity : Poison::nan,
                .seed = ++of_sizes});
  }
}

// Requests of 1, of 64 and of many new tokens in one launch.
TEST_P(PagedForward, PackedRows) {
  std::uint64_t seed = 400;
  for (const auto& masks : std::vector<std::vector<Mask>>{{},
                                                          {CausalMask{}},
                                                          {CausalMask{}, PaddingMask{}},
                                                          {SlidingWindowMask{bottom_right, true}},
                                                          {TreeMask{}}}) {
    const std::vector<DType> dtypes = on().dtypes();
    const AttentionSpec spec =
        forward_spec(dtypes[seed % dtypes.size()], 64, masks, {.varlen = true, .paged = true});
    seed += 4;
    if (!takes_next(spec)) continue;
    for (const int page_size : {1, 16, 64})
      expect({.spec = spec,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_k = 1000,
              .lengths_q = {0, 1, 64, 700, 1, 17, 5, 0},
              .lengths_k = {7, 1000, 64, 900, 0, 18, 3, 0},
              .page_size = page_size,
              .spare_rows = page_size == 16 ? 130 : 0,
              .max_seqlen_q = page_size == 1 ? std::optional<int>(700) : std::nullopt,
              .seed = seed + static_cast<std::uint64_t>(page_size)});
  }
}

TEST_P(PagedForward, GroupsOfHeads) {
  std::uint64_t seed = 500;
  for (const DType dtype : on().dtypes()) {
    const AttentionSpec spec = forward_spec(dtype, 64, {CausalMask{}}, {.paged = true});
    if (!takes_next(spec)) continue;
    for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, {8, 1}, {15, 3}, {64, 1}})
      for (const int rows : {1, 30, 200})
        expect({.spec = spec,
                .batch = 2,
                .heads_q = heads_q,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = 250,
                .page_size = 16,
                .seed = ++seed});
  }
}

TEST_P(PagedForward, DropoutAndOutputsInFloat32) {
  std::uint64_t seed = 600;
  for (const bool varlen : {false, true}) {
    const AttentionSpec spec =
        forward_spec(DType::bf16, 64, {CausalMask{}},
                     {.varlen = varlen, .dropout = true, .o_dtype = DType::fp32, .paged = true});
    if (!takes_next(spec)) continue;
    for (const int page_size : {2, 48})
      expect({.spec = spec,
              .batch = 2,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_q = 90,
              .seqlen_k = 500,
              .lengths_q = varlen ? std::vector{90, 1} : std::vector<int>{},
              .lengths_k = {500, 177},
              .page_size = page_size,
              .seed = ++seed});
  }
}

TEST_P(PagedForward, Int8) {
  expect_8bit(DType::int8, 700);
}
TEST_P(PagedForward, Fp8E4m3) {
  expect_8bit(DType::fp8_e4m3, 800);
}
TEST_P(PagedForward, Fp8E5m2) {
  expect_8bit(DType::fp8_e5m2, 900);
}

TEST_P(PagedForward, NothingToDo) {
  const AttentionSpec spec = forward_spec(DType::bf16, 64, {}, {.paged = true});
  expect({.spec = spec, .batch = 0, .seqlen_q = 1, .seqlen_k = 40, .page_size = 16});
  expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 40, .page_size = 16});
  expect({.spec = spec, .batch = 2, .seqlen_q = 70, .seqlen_k = 0, .page_size = 16});
  expect({.spec = spec, .batch = 2, .seqlen_q = 70, .seqlen_k = 40, .lengths_k = {0, 0}, .page_size = 16});
}

FLASHJIT_ON_EVERY_DEVICE(PagedForward);

}  // namespace
}  // namespace flashjit::testing_support
