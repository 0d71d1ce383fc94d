// The hard cases of a forward, against the float64 oracle.
#include <gtest/gtest.h>

#include "codegen/families/search_space.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

const std::vector<std::vector<Mask>> every_mask = {
    {}, {CausalMask{CausalAlign::bottom_right}}, {CausalMask{CausalAlign::top_left}}};

// The output's dtypes: the spec's own, and float32.
const std::optional<DType> every_o_dtype[] = {{}, DType::fp32};

class Forward : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
};

TEST_P(Forward, SequenceLengthsAroundTileEdges) {
  for (const auto& mask : every_mask) {
    for (const int n : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257}) {
      for (const auto& [rows, keys] :
           {std::pair{n, n}, std::pair{1, n}, std::pair{n, 1}, std::pair{n, n + 37}, std::pair{n + 37, n}}) {
        expect({.spec = forward_spec(DType::bf16, 64, mask),
                .heads_q = 2,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = keys,
                .seed = static_cast<std::uint64_t>(n)});
      }
    }
  }
}

TEST_P(Forward, LongSequences) {
  for (const DType dtype : on().dtypes()) {
    for (const auto& mask : every_mask) {
      const AttentionSpec spec = forward_spec(dtype, 128, mask);
      if (!takes_next(spec)) continue;
      expect({.spec = spec, .seqlen_q = 1025, .seqlen_k = 1153});
      expect({.spec = spec, .seqlen_q = 3, .seqlen_k = 8193});
      expect({.spec = spec, .seqlen_q = 2050, .seqlen_k = 70});
    }
  }
}

TEST_P(Forward, NothingToDo) {
  for (const bool lse : {true, false}) {
    for (const auto& mask : every_mask) {
      const AttentionSpec spec = forward_spec(DType::bf16, 64, mask, {.lse = lse});
      expect({.spec = spec, .batch = 0, .seqlen_q = 7, .seqlen_k = 9});
      expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 9});
      expect({.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 0});
      expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 0});
      const AttentionSpec packed = forward_spec(DType::bf16, 64, mask, {.lse = lse, .varlen = true});
      expect({.spec = packed});
      expect({.spec = packed, .spare_rows = 5});
      expect({.spec = packed, .lengths_q = {0, 0}, .lengths_k = {0, 0}});
      expect({.spec = packed, .lengths_q = {0, 0}, .lengths_k = {3, 0}});
      expect({.spec = packed, .lengths_q = {3, 40}, .lengths_k = {0, 0}});
    }
  }
}

TEST_P(Forward, EveryHeadDim) {
  const std::vector<DType> dtypes = on().dtypes();
  for (int dim = 8; dim <= 256; dim += 8) {
    const DType dtype = dtypes[static_cast<std::size_t>(dim / 8) % dtypes.size()];
    for (const auto o_dtype : every_o_dtype) {
      const AttentionSpec spec =
          forward_spec(o_dtype == dtype ? DType::bf16 : dtype, dim, {}, {.o_dtype = o_dtype});
      if (!takes_next(spec)) continue;
      expect({.spec = spec, .heads_q = 2, .seqlen_q = 70, .seqlen_k = 131});
      expect({.spec = spec,
              .batch = 2,
              .seqlen_q = 3,
              .seqlen_k = 40,
              .layout = MemoryLayout::padded,
              .layout_kv = MemoryLayout::padded});
    }
  }
}

TEST_P(Forward, HeadDimsOfKeysAndValuesThatDiffer) {
  for (const auto& [dim, dim_v] :
       {std::pair{64, 128}, std::pair{128, 64}, std::pair{192, 128}, std::pair{8, 256}, std::pair{256, 8},
        std::pair{40, 72}, std::pair{72, 40}}) {
    for (const DType dtype : on().dtypes()) {
      for (const auto o_dtype : every_o_dtype) {
        if (o_dtype && dtype != DType::bf16) continue;
        const AttentionSpec spec =
            forward_spec(dtype, dim, every_mask[1], {.head_dim_v = dim_v, .o_dtype = o_dtype});
        if (!takes_next(spec)) continue;
        expect({.spec = spec,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 67,
                .seqlen_k = 130,
                .layout = MemoryLayout::padded,
                .layout_kv = MemoryLayout::heads_first});
      }
    }
  }
}

TEST_P(Forward, GroupedQueryHeads) {
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, std::pair{4, 2}, std::pair{6, 2}, std::pair{16, 2},
                                          std::pair{5, 1}, std::pair{32, 1}}) {
    for (const auto& mask : every_mask) {
      expect({.spec = forward_spec(DType::bf16, 64, mask),
              .batch = 2,
              .heads_q = heads_q,
              .heads_kv = heads_kv,
              .seqlen_q = 40,
              .seqlen_k = 77});
    }
    expect({.spec = forward_spec(DType::fp16, 64, every_mask[1], {.varlen = true}),
            .heads_q = heads_q,
            .heads_kv = heads_kv,
            .lengths_q = {30, 1, 70},
            .lengths_k = {30, 80, 20}});
  }
}

TEST_P(Forward, MemoryLayouts) {
  using enum MemoryLayout;
  for (const DType dtype : on().dtypes()) {
    for (const bool varlen : {false, true}) {
      for (const auto o_dtype : every_o_dtype) {
        if (o_dtype == dtype) continue;
        const AttentionSpec spec =
            forward_spec(dtype, 72, every_mask[1], {.varlen = varlen, .o_dtype = o_dtype});
        for (const MemoryLayout layout : {contiguous, heads_first, batch_inside, padded, sliced_heads, odd}) {
          if ((layout == odd && on().is_cuda()) || !takes_next(spec)) continue;
          for (const MemoryLayout layout_kv : {layout, contiguous, padded}) {
            if (o_dtype && layout_kv != layout) continue;  // o_dtype does not change how inputs are read
            for (const Poison poison : {Poison::nan, Poison::infinity}) {
              for (const std::uint64_t seed : {1, 2}) {  // a guard page after and before the tensor
                expect({.spec = spec,
                        .batch = 3,
                        .heads_q = 4,
                        .heads_kv = 2,
                        .seqlen_q = 19,
                        .seqlen_k = 45,
                        .lengths_q = {5, 33},
                        .lengths_k = {40, 29},
                        .spare_rows = 4,
                        .layout = layout,
                        .layout_kv = layout_kv,
                        .poison = poison,
                        .seed = seed});
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(Forward, PackedSequences) {
  const std::vector<int> lengths_q = {0, 5, 0, 300, 1, 64, 65, 0}, lengths_k = {7, 5, 0, 260, 130, 0, 64, 0};
  for (const DType dtype : on().dtypes()) {
    for (const auto& mask : every_mask) {
      const AttentionSpec spec = forward_spec(dtype, 64, mask, {.varlen = true});
      if (!takes_next(spec)) continue;
      for (const Poison poison : {Poison::nan, Poison::infinity}) {
        expect({.spec = spec,
                .heads_q = 4,
                .heads_kv = 2,
                .lengths_q = lengths_q,
                .lengths_k = lengths_k,
                .poison = poison});
        expect({.spec = spec,
                .heads_q = 4,
                .heads_kv = 2,
                .lengths_q = lengths_q,
                .lengths_k = lengths_k,
                .spare_rows = 130,
                .max_seqlen_q = 300,
                .max_seqlen_k = 260,
                .poison = poison});
      }
      expect({.spec = spec,
              .lengths_q = lengths_k,
              .lengths_k = lengths_q,
              .max_seqlen_q = 10000,
              .max_seqlen_k = 10000});
    }
  }
}

TEST_P(Forward, OneLongSequenceAmongManyShortOnes) {
  std::vector<int> lengths_q(40, 3), lengths_k(40, 5);
  lengths_q[17] = 900;
  lengths_k[17] = 1100;
  expect({.spec = forward_spec(DType::bf16, 64, every_mask[1], {.varlen = true}),
          .lengths_q = lengths_q,
          .lengths_k = lengths_k});
}

TEST_P(Forward, LseOnAndOff) {
  for (const DType dtype : on().dtypes()) {
    for (const bool lse : {true, false}) {
      for (const bool varlen : {false, true}) {
        const AttentionSpec spec = forward_spec(dtype, 128, every_mask[1], {.lse = lse, .varlen = varlen});
        if (!takes_next(spec)) continue;
        expect({.spec = spec,
                .batch = 2,
                .heads_q = 2,
                .heads_kv = 1,
                .seqlen_q = 130,
                .seqlen_k = 70,
                .lengths_q = {130, 9},
                .lengths_k = {70, 9}});
      }
    }
  }
}

TEST_P(Forward, SoftmaxScales) {
  for (const DType dtype : own_dtypes()) {
    for (const float scale : {1e-6f, 0.02f, 1.0f, 3.0f}) {
      expect({.spec = forward_spec(dtype, 64, every_mask[1]),
              .heads_q = 2,
              .heads_kv = 2,
              .seqlen_q = 65,
              .seqlen_k = 200,
              .softmax_scale = scale});
    }
  }
}

TEST_P(Forward, ScoresThatAreHardForAnOnlineSoftmax) {
  for (const DType dtype : own_dtypes()) {
    for (const auto& mask : every_mask) {
      for (const Data data :
           {Data::equal_scores, Data::rising, Data::falling, Data::huge_scores, Data::positive_v}) {
        expect({.spec = forward_spec(dtype, 64, mask),
                .heads_q = 2,
                .heads_kv = 1,
                .seqlen_q = 140,
                .seqlen_k = 900,
                .data = data});
        expect({.spec = forward_spec(dtype, 64, mask),
                .heads_q = 2,
                .heads_kv = 1,
                .seqlen_q = 900,
                .seqlen_k = 140,
                .data = data});
      }
    }
  }
}

TEST_P(Forward, MoreHeadsThanAGridDimensionHolds) {
  for (const bool varlen : {false, true}) {
    const AttentionSpec spec = forward_spec(DType::bf16, 8, {}, {.varlen = varlen});
    if (takes_next(spec))
      expect({.spec = spec,
              .batch = 70,
              .heads_q = 1000,
              .heads_kv = 500,
              .seqlen_q = 2,
              .seqlen_k = 3,
              .lengths_q = std::vector<int>(70, 2),
              .lengths_k = std::vector<int>(70, 3)});
    if (takes_next(spec))
      expect({.spec = spec,
              .batch = 70000,
              .seqlen_q = 1,
              .seqlen_k = 2,
              .lengths_q = std::vector<int>(70000, 1),
              .lengths_k = std::vector<int>(70000, 2)});
  }
}

// Every config that the tuner may choose computes the same result, and so do pins that it would not choose.
TEST_P(Forward, PinnedTiles) {
  const Target target = on().engine().target();
  for (const DType dtype : on().dtypes()) {
    for (const int dim : {64, 128}) {
      const AttentionSpec free = forward_spec(dtype, dim, every_mask[1]);
      std::vector<KernelConfig> configs = search_space(free, target);
      const std::size_t step = configs.size() / 6 + 1;
      std::vector<KernelConfig> chosen;
      for (std::size_t i = 0; i < configs.size(); i += step) chosen.push_back(configs[i]);
      chosen.push_back(configs.back());
      if (!on().is_cuda()) chosen.push_back({.block_m = 48, .block_n = 80, .num_stages = 1, .num_warps = 1});
      for (const KernelConfig& config : chosen) {
        if (!takes_next(free)) continue;
        AttentionSpec pinned = free;
        pinned.config = flashjit::pinned(config);
        const Case c{.spec = pinned, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 333};
        expect(c);
        EXPECT_EQ(on().engine().get(pinned, c.shape()).info().config, config);
      }
    }
  }
}

FLASHJIT_ON_EVERY_DEVICE(Forward);

}  // namespace
}  // namespace flashjit::testing_support
