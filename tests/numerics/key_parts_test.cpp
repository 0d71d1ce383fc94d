// Tiles whose keys are processed in parts, because there are too few rows to occupy every thread (CPU).
#include <gtest/gtest.h>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class KeyParts : public ComputesOnEveryDevice {
 protected:
  using Body = void (*)(void*, std::int64_t, std::int64_t);

  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    if (GetParam() && on().is_cuda()) GTEST_SKIP() << "threads are a CPU's";
    const auto first_to_last = [this](std::int64_t count, Body body, void* context) {
      pieces_ = count;
      for (std::int64_t i = 0; i < count; ++i) body(context, i, i + 1);
    };
    const auto last_to_first = [](std::int64_t count, Body body, void* context) {
      for (std::int64_t i = count; i-- > 0;) body(context, i, i + 1);
    };
    if (!GetParam()) return;
    engines_.push_back(on().make_engine({.num_threads = threads, .parallel_for = first_to_last}));
    engines_.push_back(on().make_engine({.num_threads = threads, .parallel_for = last_to_first}));
    engines_.push_back(on().make_engine({.num_threads = threads}));
  }

  // The result is right, and has the same bits whichever part of a tile ends last.
  void expect(const Case& c) {
    if (!takes_next(c.spec)) return;
    SCOPED_TRACE(c.str());
    Workload workload(on(), c);
    std::vector<std::byte> bits;
    for (const auto& engine : engines_) {
      workload.reset();
      workload.kernel(*engine).launch(workload.args());
      EXPECT_TRUE(workload.check());
      if (bits.empty()) bits = workload.outputs();
      EXPECT_EQ(workload.outputs(), bits);
    }
    const int rows = c.seqlen_q * (c.heads_q / c.heads_kv);
    const std::int64_t most_tiles = std::int64_t{c.batch} * c.heads_kv * ((rows + 15) / 16);
    EXPECT_GT(pieces_, most_tiles) << "keys were not worked on in parts";
  }

  static constexpr int threads = 24;
  std::int64_t pieces_ = 0;
  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST_P(KeyParts, LengthsAndHeadDims) {
  std::uint64_t seed = 0;
  for (const DType dtype : on().dtypes())
    for (const auto& [dim, dim_v] : {std::pair{64, 64}, {80, 80}, {256, 40}})
      for (const auto& [rows, keys] : {std::pair{1, 3000}, {1, 2049}, {7, 1500}, {16, 1025}})
        expect({.spec = forward_spec(dtype, dim, {}, {.head_dim_v = dim_v, .lse = dim != 80}),
                .batch = 2,
                .heads_q = 2,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = ++seed});
}

TEST_P(KeyParts, Masks) {
  const std::vector<std::vector<Mask>> masks = {
      {CausalMask{}},
      {CausalMask{top_left}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{bottom_right, true}},
      {PaddingMask{}},
      {CausalMask{}, PaddingMask{}},
      {BlockSparseMask{16, 64}},
      {BlockSparseMask{128, 128}, CausalMask{}, PaddingMask{}},
      {BlockSparseMask{64, 64, true}},
      {TreeMask{}},
      {TreeMask{}, PaddingMask{}},
  };
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const auto& [rows, keys] : {std::pair{1, 1600}, {16, 1333}, {13, 1024}})
      expect({.spec = forward_spec(DType::fp32, 64, mask, {.dropout = rows == 13}),
              .batch = 3,
              .heads_q = 2,
              .heads_kv = 2,
              .seqlen_q = rows,
              .seqlen_k = keys,
              .poison = ++seed % 2 ? Poison::nan : Poison::infinity,
              .seed = seed});
}

TEST_P(KeyParts, GroupsOfHeads) {
  std::uint64_t seed = 0;
  for (const int group : {2, 3, 8, 16})
    for (const auto& mask : std::vector<std::vector<Mask>>{{}, {CausalMask{}}})
      expect({.spec = forward_spec(DType::bf16, 128, mask, {.dropout = seed % 2 == 1}),
              .batch = 1,
              .heads_q = 2 * group,
              .heads_kv = 2,
              .seqlen_q = 5,
              .seqlen_k = 3001,
              .seed = ++seed});
}

TEST_P(KeyParts, PackedSequences) {
  expect({.spec = forward_spec(DType::bf16, 128, {CausalMask{}}, {.varlen = true}),
          .batch = 4,
          .heads_q = 2,
          .heads_kv = 2,
          .seqlen_q = 16,
          .seqlen_k = 2000,
          .lengths_q = {16, 0, 9, 1},
          .lengths_k = {2000, 700, 0, 1999}});
}

// Scores that rise, fall or are all equal: the maxima of parts are far apart, or equal.
TEST_P(KeyParts, Maxima) {
  std::uint64_t seed = 0;
  for (const Data data : {Data::rising, Data::falling, Data::equal_scores, Data::huge_scores})
    expect({.spec = forward_spec(DType::fp32, 64),
            .batch = 1,
            .heads_q = 3,
            .heads_kv = 3,
            .seqlen_q = 16,
            .seqlen_k = 3000,
            .data = data,
            .seed = ++seed});
}

FLASHJIT_ON_EVERY_DEVICE(KeyParts);

}  // namespace
}  // namespace flashjit::testing_support
