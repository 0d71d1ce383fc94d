// float32 outputs of 16-bit inputs: partial results that lose no precision.
// forward_test.cpp tests their head dims and layouts.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

class FloatOutput : public ComputesOnEveryDevice {
 protected:
  static AttentionSpec spec(DType dtype, int head_dim, std::vector<Mask> mask = {},
                            SpecOptions options = {}) {
    options.o_dtype = DType::fp32;
    return forward_spec(dtype, head_dim, std::move(mask), options);
  }
  static DType dtype(std::uint64_t i) { return i % 2 ? DType::fp16 : DType::bf16; }
  void expect(const Case& c) {
    if (!takes_next(c.spec)) return;
    EXPECT_TRUE(computes(on(), c));
  }
};

// Equal scores have weights of 1, which 16 bits hold exactly. So hardly anything but the
// output is rounded: sums as much as float32 rounds a score, and with AMX exp2 by 2^-13.
TEST_P(FloatOutput, IsRoundedToFloat) {
  const double unit = on().target().ends_with("amx") ? 0x1p-12 : 0x1p-16;
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    Workload workload(
        on(),
        {.spec = spec(dtype, 72), .heads_q = 2, .seqlen_q = 70, .seqlen_k = 3, .data = Data::equal_scores});
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    ASSERT_TRUE(workload.check());
    const Tensor &v = *workload.host_args().v, &o = *workload.host_args().o;
    ASSERT_EQ(o.dtype, DType::fp32);
    for (int head = 0; head < 2; ++head)
      for (int row = 0; row < 70; ++row)
        for (int c = 0; c < 72; ++c) {
          double sum = 0, magnitude = 0;
          for (int key = 0; key < 3; ++key) {
            const double value = verify::load_element(v.data, dtype, key * v.strides[1] + c);
            sum += value;
            magnitude += std::abs(value);
          }
          const double o_c =
              verify::load_element(o.data, o.dtype, row * o.strides[1] + head * o.strides[2] + c);
          EXPECT_NEAR(o_c, sum / 3, magnitude * unit) << "row " << row << ", column " << c;
        }
  }
}

TEST_P(FloatOutput, MasksDropoutAndLse) {
  const std::vector<std::vector<Mask>> masks = {{},
                                                {CausalMask{}},
                                                {PaddingMask{}},
                                                {TreeMask{}},
                                                {CausalMask{}, PaddingMask{}, BlockSparseMask{64, 64}}};
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const bool dropout : {false, true})
      for (const double p : dropout ? std::vector{0.3, 1.0} : std::vector{0.0})
        for (const auto& [rows, keys] : {std::pair{130, 70}, {33, 300}}) {
          ++seed;
          expect({.spec =
                      spec(dtype(seed), seed % 3 ? 64 : 72, mask, {.lse = seed % 2 == 0, .dropout = dropout}),
                  .batch = 3,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .seqlen_q = rows,
                  .seqlen_k = keys,
                  .poison = seed % 2 ? Poison::infinity : Poison::nan,
                  .dropout_p = p,
                  .seed = seed});
        }
}

TEST_P(FloatOutput, PackedSequencesAndHeads) {
  std::uint64_t seed = 0;
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, {4, 2}, {14, 2}, {71, 1}})
    for (const bool causal : {false, true}) {
      const std::vector<Mask> mask = causal ? std::vector<Mask>{CausalMask{}} : std::vector<Mask>{};
      AttentionSpec packed = spec(dtype(++seed), 64, mask, {.varlen = true});
      AttentionSpec apart = spec(dtype(seed), 128, mask);
      if (on().is_cuda() && Target::parse(on().target()).has(Instructions::wgmma))
        packed.config.pack_gqa = apart.config.pack_gqa = true;
      expect({.spec = packed,
              .heads_q = heads_q,
              .heads_kv = heads_kv,
              .lengths_q = {0, 5, 100, 1, 64, 65, 0},
              .lengths_k = {7, 5, 260, 130, 0, 64, 0},
              .spare_rows = 130,
              .seed = seed});
      for (const int rows : {1, 37})
        expect({.spec = apart,
                .batch = 2,
                .heads_q = heads_q,
                .heads_kv = heads_kv,
                .seqlen_q = rows,
                .seqlen_k = 20 * rows / (causal ? 37 : 1),
                .seed = seed});
    }
}

FLASHJIT_ON_EVERY_DEVICE(FloatOutput);

}  // namespace
}  // namespace flashjit::testing_support
