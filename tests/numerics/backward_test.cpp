// The hard cases of a backward, against the float64 oracle.
#include <gtest/gtest.h>

#include <limits>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

const std::vector<std::vector<Mask>> causal_masks = {
    {}, {CausalMask{CausalAlign::bottom_right}}, {CausalMask{CausalAlign::top_left}}};

AttentionSpec backward_spec(DType dtype, int head_dim, std::vector<Mask> mask = {},
                            const SpecOptions& options = {}) {
  return attention_spec(Operation::backward, dtype, head_dim, std::move(mask), options);
}

class Backward : public ComputesOnEveryDevice {
 protected:
  void SetUp() override {
    ComputesOnEveryDevice::SetUp();
    if (!IsSkipped()) widest_ = on().is_cuda() ? DType::fp16 : DType::fp32;
  }
  DType widest_ = DType::fp32;  // of the device's dtypes the most exact
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
};

TEST_P(Backward, SequenceLengthsAroundTileEdges) {
  for (const auto& mask : causal_masks) {
    for (const int n : {1, 2, 15, 17, 31, 33, 47, 48, 49, 64, 95, 97, 127, 128, 129, 257}) {
      for (const auto& [rows, keys] :
           {std::pair{n, n}, std::pair{1, n}, std::pair{n, 1}, std::pair{n, n + 37}, std::pair{n + 37, n}}) {
        expect({.spec = backward_spec(widest_, 64, mask),
                .heads_q = 2,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = static_cast<std::uint64_t>(n)});
      }
    }
  }
}

TEST_P(Backward, NothingToDo) {
  for (const auto& mask : causal_masks) {
    const AttentionSpec spec = backward_spec(DType::bf16, 64, mask);
    expect({.spec = spec, .batch = 0, .seqlen_q = 7, .seqlen_k = 9});
    expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 9});
    expect({.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 0});
    expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 0});
    const AttentionSpec packed = backward_spec(DType::bf16, 64, mask, {.varlen = true});
    expect({.spec = packed});
    expect({.spec = packed, .spare_rows = 5});
    expect({.spec = packed, .lengths_q = {0, 0}, .lengths_k = {3, 0}});
    expect({.spec = packed, .lengths_q = {3, 40}, .lengths_k = {0, 0}});
  }
}

TEST_P(Backward, HeadDimsAndDtypes) {
  for (const DType dtype : on().dtypes())
    for (const auto& [dim, dim_v] :
         {std::pair{8, 8}, std::pair{64, 64}, std::pair{128, 128}, std::pair{256, 256}, std::pair{72, 40},
          std::pair{40, 72}, std::pair{8, 256}, std::pair{192, 128}})
      for (const bool fp32_gradients : {false, true}) {
        AttentionSpec spec = backward_spec(dtype, dim, causal_masks[1], {.head_dim_v = dim_v});
        if (fp32_gradients) spec.grad_dtype = DType::fp32;
        spec = spec.validated();
        if (!takes_next(spec)) continue;
        expect({.spec = spec, .heads_q = 4, .heads_kv = 2, .seqlen_q = 67, .seqlen_k = 140});
      }
}

TEST_P(Backward, GroupedQueryHeadsAndPackedSequences) {
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, std::pair{6, 2}, std::pair{5, 1}}) {
    for (const auto& mask : causal_masks) {
      expect({.spec = backward_spec(DType::bf16, 64, mask),
              .batch = 2,
              .heads_q = heads_q,
              .heads_kv = heads_kv,
              .seqlen_q = 40,
              .seqlen_k = 77});
      expect({.spec = backward_spec(DType::fp16, 64, mask, {.varlen = true}),
              .heads_q = heads_q,
              .heads_kv = heads_kv,
              .lengths_q = {30, 1, 0, 170},
              .lengths_k = {30, 180, 5, 20},
              .spare_rows = 7});
    }
  }
}

TEST_P(Backward, MemoryLayouts) {
  using enum MemoryLayout;
  for (const DType dtype : on().dtypes())
    for (const MemoryLayout layout : {contiguous, heads_first, padded, sliced_heads, odd})
      for (const MemoryLayout layout_kv : {contiguous, padded, odd}) {
        if (on().is_cuda() && (layout == odd || layout_kv == odd)) continue;  // strides of 16 bytes
        const AttentionSpec spec = backward_spec(dtype, 64, causal_masks[1]);
        if (!takes_next(spec)) continue;
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 60,
                .seqlen_k = 70,
                .layout = layout,
                .layout_kv = layout_kv});
      }
}

TEST_P(Backward, EveryMaskWithAndWithoutDropout) {
  const std::vector<std::vector<Mask>> masks = {
      {SlidingWindowMask{}},
      {SlidingWindowMask{.sinks = true}},
      {PaddingMask{}},
      {BlockSparseMask{.block_m = 64, .block_n = 64}},
      {BlockSparseMask{.block_m = 32, .block_n = 128, .per_head = true}},
      {BlockSparseMask{.block_m = 48, .block_n = 80}},
      {TreeMask{}},
      {CausalMask{}, PaddingMask{}},
      {CausalMask{}, SlidingWindowMask{}, PaddingMask{}},
      {CausalMask{}, BlockSparseMask{.block_m = 64, .block_n = 64}, PaddingMask{}},
      {PaddingMask{}, TreeMask{}}};
  for (const auto& mask : masks)
    for (const bool dropout : {false, true})
      for (const Poison poison : {Poison::nan, Poison::infinity})
        for (const bool varlen : {false, true}) {
          const AttentionSpec spec = backward_spec(widest_, 64, mask, {.varlen = varlen, .dropout = dropout});
          if (!takes_next(spec, 4)) continue;
          Case c{.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 200, .seqlen_k = 260};
          if (varlen) c.lengths_q = {100, 200}, c.lengths_k = {130, 260};
          c.poison = poison;
          expect(c);
        }
}

// At 1 all weights drop, and dlse alone has gradients.
TEST_P(Backward, DropoutOfMostWeightsAndOfAll) {
  for (const DType dtype : on().dtypes())
    for (const double p : {0.99, 1.0})
      expect({.spec = backward_spec(dtype, 64, causal_masks[1], {.dropout = true}),
              .heads_q = 2,
              .heads_kv = 1,
              .seqlen_q = 100,
              .seqlen_k = 200,
              .dropout_p = p});
}

TEST_P(Backward, ScoresOfEveryKind) {
  for (const DType dtype : on().dtypes())
    for (const Data data :
         {Data::equal_scores, Data::positive_v, Data::plain, Data::outliers, Data::long_rows})
      expect({.spec = backward_spec(dtype, 64, causal_masks[1]),
              .seqlen_q = 300,
              .seqlen_k = 300,
              .data = data});
}

TEST_P(Backward, EqualBitsRunAfterRun) {
  for (const DType dtype : own_dtypes())
    for (const bool varlen : {false, true}) {
      AttentionSpec spec = backward_spec(dtype, 64, causal_masks[1], {.varlen = varlen, .dropout = !varlen});
      spec.deterministic = true;
      if (!takes_next(spec)) continue;
      Case c{.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 400, .seqlen_k = 400};
      if (varlen) c.lengths_q = {200, 1, 300}, c.lengths_k = {200, 150, 280};
      Workload workload(on(), c);
      const Kernel& kernel = workload.kernel(on().engine());
      std::vector<std::byte> first;
      for (int run = 0; run < 20; ++run) {
        workload.reset();
        kernel.launch(workload.args());
        if (run == 0) first = workload.outputs();
        EXPECT_EQ(workload.outputs(), first);
      }
      EXPECT_TRUE(workload.check());
    }
}

// Rows that see nothing, keys that nobody sees, and keys that only some rows see.
TEST_P(Backward, NotANumberStaysBehindTheMask) {
  if (on().is_cuda()) GTEST_SKIP() << "on a GPU that is promised behind lengths and block lists only";
  const auto spoil = [](GuardedTensor& tensor, std::int64_t begin, std::int64_t end) {
    const Tensor& t = tensor.on_host();
    for (std::int64_t row = begin; row < end; ++row)
      for (std::int64_t h = 0; h < t.shape[2]; ++h)
        for (std::int64_t c = 0; c < t.shape[3]; ++c)
          verify::store_element(t.data, t.dtype, row * t.strides[1] + h * t.strides[2] + c,
                                std::numeric_limits<float>::quiet_NaN());
    tensor.upload();
  };
  for (const DType dtype : own_dtypes()) {
    Workload keys(on(), {.spec = backward_spec(dtype, 64, {CausalMask{CausalAlign::top_left}}),
                         .heads_q = 2,
                         .heads_kv = 1,
                         .seqlen_q = 100,
                         .seqlen_k = 170});
    spoil(keys.k(), 100, 170);
    spoil(keys.v(), 100, 170);
    keys.kernel(on().engine()).launch(keys.args());
    EXPECT_TRUE(keys.check());
    Workload rows(on(), {.spec = backward_spec(dtype, 64, {CausalMask{}}),
                         .heads_q = 2,
                         .heads_kv = 1,
                         .seqlen_q = 170,
                         .seqlen_k = 100});
    spoil(rows.q(), 0, 70);
    spoil(rows.tensor(&AttentionArgs::d_o), 0, 70);
    rows.kernel(on().engine()).launch(rows.args());
    EXPECT_TRUE(rows.check());
  }
}

// With block lists that is promised on GPUs, too, for every pair that the mask drops.
TEST_P(Backward, NotANumberStaysInDroppedBlocks) {
  const std::vector<std::vector<Mask>> masks = {
      {BlockSparseMask{.block_m = 16, .block_n = 32, .per_head = true}},
      {CausalMask{}, PaddingMask{}, BlockSparseMask{.block_m = 64, .block_n = 64}},
      {BlockSparseMask{.block_m = 128, .block_n = 128}}};
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const DType dtype : own_dtypes())
      for (const bool deterministic : {false, true}) {
        const bool odd = ++seed % 2;
        AttentionSpec spec = backward_spec(dtype, 64, mask, {.varlen = odd, .dropout = deterministic != odd});
        spec.deterministic = deterministic && on().is_cuda();
        spec = spec.validated();
        if (!takes_next(spec)) continue;
        Case c{.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200, .seed = seed};
        if (odd) c.lengths_q = {100, 150}, c.lengths_k = {130, 200};
        Workload workload(on(), c);
        workload.spoil();
        workload.reset();
        workload.kernel(on().engine()).launch(workload.args());
        EXPECT_TRUE(workload.check());
      }
}

FLASHJIT_ON_EVERY_DEVICE(Backward);

}  // namespace
}  // namespace flashjit::testing_support
