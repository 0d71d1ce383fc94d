// How far NaN and infinity in K and V reach.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/mask.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class NonFinite : public ComputesOnEveryDevice {
 protected:
  static constexpr int seqlen_q = 200, seqlen_k = 300;

  void run(Workload& workload) {
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.fetch());
  }
  static std::vector<double> values(const Tensor& t) {
    std::vector<double> values(static_cast<std::size_t>(t.shape[1] * t.shape[3]));
    for (std::int64_t row = 0; row < t.shape[1]; ++row)
      for (std::int64_t c = 0; c < t.shape[3]; ++c)
        values[static_cast<std::size_t>(row * t.shape[3] + c)] =
            verify::load_element(t.data, t.dtype, row * t.strides[1] + c);
    return values;
  }
};

// On a CPU, rows that do not see such a key have the result that they have without it. On
// a GPU, 0 * NaN is NaN in a product with V. There this holds for all rows if the key's K
// is bad; for a bad V, it holds for tiles in which no row sees a key of the same block.
TEST_P(NonFinite, KeysReachTheRowsThatSeeThem) {
  const std::vector<std::vector<Mask>> masks = {
      {CausalMask{}},
      {CausalMask{top_left}},
      {SlidingWindowMask{}},
      {BlockSparseMask{16, 64}},
      {BlockSparseMask{128, 128}},
      {BlockSparseMask{64, 32}, CausalMask{}},
      {TreeMask{}},
  };
  std::uint64_t seed = 0;
  int reached = 0, spared = 0;
  for (const auto& mask : masks)
    for (const DType dtype : own_dtypes()) {
      if (dtype == (on().is_cuda() ? DType::fp32 : DType::fp16)) continue;
      for (const bool in_v : {true, false}) {
        Workload workload(on(), {.spec = forward_spec(dtype, 64, mask, {.lse = false}),
                                 .seqlen_q = seqlen_q,
                                 .seqlen_k = seqlen_k,
                                 .data = Data::plain,
                                 .seed = ++seed});
        SCOPED_TRACE(workload.given().str() + (in_v ? " V" : " K"));
        run(workload);
        const std::vector<double> clean = values(*workload.host_args().o);
        // Five keys spread over the blocks are changed, in every third column.
        const int keys[] = {3, 70, 131, 206, 290};
        GuardedTensor& tensor = in_v ? workload.v() : workload.k();
        const Tensor t = tensor.on_host();
        const float inf = std::numeric_limits<float>::infinity();
        for (const int key : keys)
          for (std::int64_t c = 0; c < 64; c += 3)
            verify::store_element(t.data, t.dtype, key * t.strides[1] + c,
                                  !in_v || key % 2 ? std::numeric_limits<float>::quiet_NaN() : inf);
        tensor.upload();
        run(workload);
        const std::vector<double> actual = values(*workload.host_args().o);

        const auto& config = workload.kernel(on().engine()).info().config;
        const verify::Sequence sequence =
            verify::sequences_of(workload.given().spec, workload.host_args())[0];
        const auto sees = [&](int row, int key) {
          return verify::sees(workload.given().spec, workload.host_args(), sequence, 0, row, key);
        };
        const auto any_near = [&](int row, int key) {
          for (int i = row / config.block_m * config.block_m;
               i < std::min((row / config.block_m + 1) * config.block_m, seqlen_q); ++i)
            for (int j = key / config.block_n * config.block_n;
                 j < std::min((key / config.block_n + 1) * config.block_n, seqlen_k); ++j)
              if (sees(i, j)) return true;
          return false;
        };
        for (int row = 0; row < seqlen_q; ++row) {
          bool seen = false, near = false;
          for (const int key : keys) {
            seen |= sees(row, key);
            near |= on().is_cuda() && in_v && any_near(row, key);
          }
          if (near && !seen) continue;
          for (int c = 0; c < 64; ++c) {
            const std::size_t at = static_cast<std::size_t>(row * 64 + c);
            if (seen && (!in_v || c % 3 == 0)) {
              ++reached;
              ASSERT_FALSE(std::isfinite(actual[at])) << "row " << row << ", dim " << c;
            } else {
              spared += !seen;
              ASSERT_NEAR(actual[at], clean[at], 0x1p-6) << "row " << row << ", dim " << c;
            }
          }
        }
      }
    }
  EXPECT_GT(reached, 0);
  EXPECT_GT(spared, 0);
}

// The second of two rows alone sees the last key. On a GPU a bad V, or the scale of one, may reach both.
TEST_P(NonFinite, ALastKeyOfADecodeReachesItsRow) {
  struct Bad {
    TensorMember tensor;
    bool of_scales;
  };
  for (const auto& [member, of_scales] : {Bad{&AttentionArgs::k, false},
                                          {&AttentionArgs::v, false},
                                          {&AttentionArgs::k_scale, true},
                                          {&AttentionArgs::v_scale, true}}) {
    const bool of_v = member == &AttentionArgs::v || member == &AttentionArgs::v_scale;
    SpecOptions options{.lse = false};
    if (of_scales) options.kv_dtype = DType::int8, options.kv_scale = KvScale::token_head;
    Workload workload(on(), {.spec = decode_spec(DType::bf16, 64, {CausalMask{}}, options),
                             .seqlen_q = 2,
                             .seqlen_k = 100,
                             .lengths_k = {100},
                             .data = Data::plain});
    SCOPED_TRACE(argument_of(member).name);
    const Tensor t = workload.tensor(member).on_host();
    for (std::int64_t c = 0; c < (of_scales ? 1 : 64); ++c)
      verify::store_element(t.data, t.dtype, 99 * t.strides[1] + c, std::numeric_limits<float>::quiet_NaN());
    workload.tensor(member).upload();
    run(workload);
    const std::vector<double> actual = values(*workload.host_args().o);
    for (std::size_t i = 0; i < actual.size(); ++i) {
      if (i < 64 && of_v && on().is_cuda()) continue;
      ASSERT_EQ(std::isnan(actual[i]), i >= 64) << i;
    }
  }
}

// A product of 0 is no exception.
TEST_P(NonFinite, ScalesOfKeysReachTheRowsThatSeeThem) {
  Workload workload(
      on(), {.spec = decode_spec(DType::bf16, 64, {},
                                 {.lse = false, .kv_dtype = DType::int8, .kv_scale = KvScale::token_head}),
             .seqlen_k = 100,
             .lengths_k = {100},
             .data = Data::plain});
  const Tensor q = workload.q().on_host(), scales = workload.tensor(&AttentionArgs::k_scale).on_host();
  for (std::int64_t c = 0; c < 64; ++c) verify::store_element(q.data, q.dtype, c, 0);
  static_cast<float*>(scales.data)[5 * scales.strides[1]] = std::numeric_limits<float>::quiet_NaN();
  workload.q().upload();
  workload.tensor(&AttentionArgs::k_scale).upload();
  run(workload);
  for (const double value : values(*workload.host_args().o)) ASSERT_TRUE(std::isnan(value));
}

TEST_P(NonFinite, QueriesReachTheirOwnRow) {
  for (const DType dtype : own_dtypes()) {
    Workload workload(on(), {.spec = forward_spec(dtype, 64, {CausalMask{}}, {.lse = false}),
                             .seqlen_q = seqlen_q,
                             .seqlen_k = seqlen_k,
                             .data = Data::plain});
    run(workload);
    std::vector<double> expected = values(*workload.host_args().o);
    const Tensor q = workload.q().on_host();
    for (std::int64_t c = 0; c < 64; ++c)
      verify::store_element(q.data, q.dtype, 77 * q.strides[1] + c, std::numeric_limits<float>::quiet_NaN());
    workload.q().upload();
    run(workload);
    const std::vector<double> actual = values(*workload.host_args().o);
    for (std::size_t i = 0; i < actual.size(); ++i)
      ASSERT_TRUE(i / 64 == 77 ? std::isnan(actual[i]) : actual[i] == expected[i]) << "row " << i / 64;
  }
}

FLASHJIT_ON_EVERY_DEVICE(NonFinite);

}  // namespace
}  // namespace flashjit::testing_support
