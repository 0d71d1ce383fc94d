// Query heads of one key/value head in one tile (sm_90a, and CPUs with few rows), whatever their number.
#include <gtest/gtest.h>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class PackGqa : public ComputesOnEveryDevice {
 protected:
  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    if (GetParam() && on().is_cuda() && !Target::parse(on().target()).has(Instructions::wgmma))
      GTEST_SKIP() << "of GPUs' kernels only sm_90a's pack heads";
  }
  void expect(Case c, PinnedConfig pins = {}) {
    if (!takes_next(c.spec, 9)) return;
    if (on().is_cuda()) pins.pack_gqa = true;
    c.spec.config = pins;
    EXPECT_TRUE(computes(on(), c));
  }
  // Query heads for each key/value head, and key/value heads.
  static constexpr std::pair<int, int> groups[] = {{1, 3}, {2, 2}, {3, 2}, {4, 2},  {5, 2},
                                                   {6, 1}, {7, 2}, {8, 2}, {16, 1}, {71, 1}};
};

TEST_P(PackGqa, GroupsAndLengths) {
  const std::vector<std::vector<Mask>> every_mask = {{}, {CausalMask{}}, {CausalMask{top_left}}};
  std::uint64_t seed = 0;
  for (const auto& [group, heads_kv] : groups)
    for (const auto& mask : every_mask)
      for (const auto& [rows, keys] : {std::pair{1, 300},
                                       {2, 2},
                                       {3, 70},
                                       {17, 333},
                                       {37, 20},
                                       {64, 1500},
                                       {65, 65},
                                       {127, 200},
                                       {300, 257},
                                       {515, 700}}) {
        ++seed;
        // Ten tiles of packed rows are enough: the oracle takes most of the time.
        if (rows * group > 10'000 && !on().is_cuda() && !test_all()) continue;
        expect({.spec = forward_spec(seed % 2 ? DType::bf16 : DType::fp16, 64, mask),
                .batch = 2,
                .heads_q = group * heads_kv,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = seed});
      }
}

TEST_P(PackGqa, Tiles) {
  for (const auto& [group, heads_kv] : groups)
    for (const int block_m : {64, 128, 192})
      for (const int rows : {1, 11, 50, 130})
        expect({.spec = forward_spec(DType::bf16, block_m == 64 ? 256 : 64, {CausalMask{}}),
                .batch = 2,
                .heads_q = group * heads_kv,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = 210,
                .seed = static_cast<std::uint64_t>(rows)},
               {.block_m = block_m});
}

TEST_P(PackGqa, HeadDimsAndLayouts) {
  using enum MemoryLayout;
  std::uint64_t seed = 0;
  for (const auto& [dim, dim_v] :
       {std::pair{8, 8}, {40, 72}, {72, 40}, {80, 80}, {128, 128}, {192, 128}, {256, 256}})
    for (const MemoryLayout layout : {contiguous, heads_first, batch_inside, padded, sliced_heads})
      for (const bool lse : {true, false})
        expect({.spec = forward_spec(DType::bf16, dim, {CausalMask{}}, {.head_dim_v = dim_v, .lse = lse}),
                .batch = 3,
                .heads_q = 10,
                .heads_kv = 2,
                .seqlen_q = 29,
                .seqlen_k = 150,
                .layout = layout,
                .layout_kv = padded,
                .poison = seed % 2 ? Poison::infinity : Poison::nan,
                .seed = ++seed});
}

TEST_P(PackGqa, Masks) {
  const std::vector<std::vector<Mask>> masks = {
      {TreeMask{}},
      {TreeMask{}, PaddingMask{}},
      {PaddingMask{}},
      {CausalMask{}, PaddingMask{}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{top_left}, PaddingMask{}},
      {SlidingWindowMask{bottom_right, true}},
      {BlockSparseMask{64, 64}},
      {BlockSparseMask{16, 48}},
      {BlockSparseMask{128, 128}, CausalMask{}, PaddingMask{}},
  };
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const auto& [group, heads_kv] : {std::pair{2, 2}, {3, 2}, {4, 2}, {7, 2}, {16, 1}})
      for (const auto& [rows, keys] : {std::pair{1, 130}, {33, 300}, {64, 600}, {130, 130}, {200, 70}})
        expect({.spec = forward_spec(DType::bf16, 128, mask),
                .batch = 3,
                .heads_q = group * heads_kv,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = ++seed});
}

// Dropout's words are those of a row's own head.
TEST_P(PackGqa, Dropout) {
  std::uint64_t seed = 0;
  for (const auto& mask : std::vector<std::vector<Mask>>{{}, {CausalMask{}}, {TreeMask{}}})
    for (const auto& [group, heads_kv] : groups)
      for (const auto& [rows, keys] : {std::pair{1, 300}, {37, 150}, {130, 130}})
        expect({.spec = forward_spec(DType::bf16, 64, mask, {.dropout = true}),
                .batch = 2,
                .heads_q = group * heads_kv,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = ++seed});
}

TEST_P(PackGqa, PackedSequences) {
  std::uint64_t seed = 0;
  for (const auto& mask : std::vector<std::vector<Mask>>{
           {}, {CausalMask{}}, {CausalMask{top_left}}, {TreeMask{}}, {BlockSparseMask{64, 64}}})
    for (const auto& [group, heads_kv] : groups)
      expect({.spec = forward_spec(DType::bf16, 64, mask, {.varlen = true}),
              .heads_q = group * heads_kv,
              .heads_kv = heads_kv,
              .lengths_q = {0, 5, 100, 1, 64, 65, 0},
              .lengths_k = {7, 5, 260, 130, 0, 64, 0},
              .spare_rows = seed % 2 ? 130 : 0,
              .seed = ++seed});
}

// Tile rows that belong to no query row hold the previous content of shared memory.
TEST_P(PackGqa, TheSameBitsWhateverRanBefore) {
  AttentionSpec spec = forward_spec(DType::bf16, 64);
  spec.config.block_m = 64;
  if (on().is_cuda()) spec.config.pack_gqa = true;
  Workload workload(
      on(), {.spec = spec, .batch = 40, .heads_q = 10, .heads_kv = 2, .seqlen_q = 23, .seqlen_k = 900});
  std::vector<std::vector<std::byte>> outputs;
  for (const Data before : {Data::random, Data::huge_scores, Data::positive_v}) {
    Workload other(on(), {.spec = forward_spec(DType::bf16, 128),
                          .batch = 20,
                          .heads_q = 8,
                          .heads_kv = 8,
                          .seqlen_q = 256,
                          .seqlen_k = 64,
                          .data = before});
    other.kernel(on().engine()).launch(other.args());
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    outputs.push_back(workload.outputs());
  }
  EXPECT_TRUE(workload.check());
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(outputs[0], outputs[2]);
}

FLASHJIT_ON_EVERY_DEVICE(PackGqa);

}  // namespace
}  // namespace flashjit::testing_support
