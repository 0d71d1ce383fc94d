// Packed blocks of K and V that a thread keeps for the next tiles of their head (CPU).
#include <gtest/gtest.h>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class PackedBlocks : public ComputesOnEveryDevice {
 protected:
  using Body = void (*)(void*, std::int64_t, std::int64_t);

  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    if (GetParam() && on().is_cuda()) GTEST_SKIP() << "GPUs pack nothing";
    // On one thread, in another order: every fifth piece, so that the heads alternate.
    const auto in_turns = [](std::int64_t count, Body body, void* context) {
      for (std::int64_t first = 0; first < 5; ++first)
        for (std::int64_t i = first; i < count; i += 5) body(context, i, i + 1);
    };
    if (!GetParam()) return;
    engines_.push_back(on().make_engine({.num_threads = 1}));
    engines_.push_back(on().make_engine({.num_threads = 3}));
    engines_.push_back(on().make_engine({.num_threads = 2, .parallel_for = in_turns}));
    engines_.push_back(on().make_engine({.num_threads = 24}));  // too many threads to keep any block
  }

  // The result is right, and has the same bits whatever a thread had packed before.
  void expect(Case c) {
    if (!takes_next(c.spec)) return;
    c.spec.config.block_m = 48;
    c.spec.config.block_n = 80;
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
  }

  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST_P(PackedBlocks, Masks) {
  const std::vector<std::vector<Mask>> masks = {{},
                                                {CausalMask{}},
                                                {CausalMask{top_left}, PaddingMask{}},
                                                {SlidingWindowMask{}},
                                                {SlidingWindowMask{bottom_right, true}},
                                                {PaddingMask{}},
                                                {BlockSparseMask{16, 64}},
                                                {BlockSparseMask{48, 80}, SlidingWindowMask{}},
                                                {BlockSparseMask{32, 32, true}},
                                                {TreeMask{}, PaddingMask{}}};
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const DType dtype : {DType::bf16, DType::fp32})
      expect({.spec = forward_spec(dtype, 64, mask, {.dropout = ++seed % 4 == 0}),
              .batch = 2,
              .heads_q = 4,
              .heads_kv = 2,
              .seqlen_q = 300,
              .seqlen_k = 500,
              .poison = seed / 2 % 2 ? Poison::nan : Poison::infinity,
              .seed = seed});
}

TEST_P(PackedBlocks, PackedSequences) {
  for (const DType dtype : {DType::bf16, DType::fp32})
    expect({.spec = forward_spec(dtype, 128, {CausalMask{}}, {.varlen = true}),
            .batch = 4,
            .heads_q = 2,
            .heads_kv = 2,
            .seqlen_q = 400,
            .seqlen_k = 500,
            .lengths_q = {400, 0, 200, 330},
            .lengths_k = {333, 500, 0, 499}});
}

FLASHJIT_ON_EVERY_DEVICE(PackedBlocks);

}  // namespace
}  // namespace flashjit::testing_support
