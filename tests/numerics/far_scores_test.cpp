// Scores so far from 0 that float32 has few or no bits left below them. GPU kernels return NaN if
// |score * log2(e)| exceeds 2^26.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <vector>

#include "tests/numerics/specs.hpp"
#include "tests/support/far_scores.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

class FarScores : public ComputesOnEveryDevice {
 protected:
  bool gives_up(double score) { return on().is_cuda() && std::abs(score) * std::numbers::log2e > 0x1p26; }

  // Launches on these engines in turn.
  void expect_shared_maxima(const Case& given, const std::vector<Engine*>& engines) {
    try {
      launch_all(given, engines);
    } catch (const Prebuilt&) {  // the kernel of all scales
    }
  }
  // undecided: some rows are NaN on GPUs.
  void expect_right(const Case& given, bool undecided) {
    Workload workload(on(), given);
    for (Engine* const engine : engines()) {
      workload.reset();
      workload.kernel(*engine).launch(workload.args());
      EXPECT_TRUE(workload.fetch());
      const verify::Report report = workload.report();
      EXPECT_EQ(report.wrong, 0) << report.str();
      EXPECT_EQ(report.undecided > 0, on().is_cuda() && undecided) << report.str();
    }
  }
  // With many threads a row's keys are processed in parts.
  std::vector<Engine*> engines() {
    if (on().is_cuda()) return {&on().engine()};
    if (!many_) many_ = on().make_engine({.num_threads = 24});
    return {&on().engine(), many_.get()};
  }

 private:
  void launch_all(Case given, const std::vector<Engine*>& engines) {
    for (const double sign : {1.0, -1.0})
      // At the first scale even a rounded offset gives the right result; at the fourth, float32 has no bits
      // left for sums beside their level; at the last one, lse is beyond float32.
      for (const double scale : {0x1p-8, 0x1p-4, 0x1p0, 0x1p4, 0x1p11, 0x1p60, 0x1p120}) {
        given.softmax_scale = static_cast<float>(scale);
        SCOPED_TRACE(given.str() + " sign " + std::to_string(sign));
        Workload workload(on(), given);
        SharedMaxima maxima(workload, on().is_cuda());
        maxima.set_scores(sign);
        for (Engine* const engine : engines) {
          workload.reset();
          workload.kernel(*engine).launch(workload.args());
          maxima.expect(scale);
        }
      }
  }

  std::unique_ptr<Engine> many_;
};

TEST_P(FarScores, KeysOfARowsMaximumShareIt) {
  for (const DType dtype : own_dtypes())
    for (const int dim : {64, 128})
      for (const int rows : {70, 1})
        expect_shared_maxima({.spec = forward_spec(dtype, dim, {CausalMask{}}),
                              .heads_q = 2,
                              .seqlen_q = rows,
                              .seqlen_k = rows == 1 ? 2000 : 330,
                              .data = Data::plain},
                             {rows == 1 ? engines().back() : &on().engine()});
}

// Whether the parts of a row are of one block, of several, or of several threads.
TEST_P(FarScores, OfADecodesParts) {
  const auto expect = [&](const AttentionSpec& spec, int rows) {
    if (!takes_next(spec, 3)) return;
    expect_shared_maxima({.spec = spec,
                          .heads_q = 4,
                          .heads_kv = 2,
                          .seqlen_q = rows,
                          .seqlen_k = 2500,
                          .lengths_k = {2500},
                          .page_size = spec.paged ? 48 : 0,
                          .data = Data::plain},
                         engines());
  };
  for (const DType dtype : own_dtypes())
    for (const bool paged : {false, true})
      for (const bool invariant : {false, true})
        expect(decode_spec(dtype, 64, {CausalMask{}}, {.paged = paged, .batch_invariant = invariant}),
               paged ? 3 : 1);
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3})
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::token_head})
      for (const bool invariant : {false, true})
        expect(decode_spec(
                   DType::bf16, 64, {CausalMask{}},
                   {.paged = true, .batch_invariant = invariant, .kv_dtype = kv_dtype, .kv_scale = kv_scale}),
               2);
}

// Left padding by a bias: whole blocks and parts of keys are far below the row's other scores, and count as
// nothing. A row of such keys alone is far itself.
TEST_P(FarScores, KeysFarBelowOthersCountAsNothing) {
  std::uint64_t seed = 0;
  for (const bool decodes : {true, false})
    for (const bool varied : {false, true})
      for (const char* const by : {"1e9", "3e9", "1e30", "2e38"}) {
        AttentionSpec spec = decodes ? decode_spec(DType::bf16, 64, {}, {.batch_invariant = varied})
                                     : forward_spec(DType::bf16, 64);
        spec = with_far_keys(spec, varied ? "2000 - 300 * row" : "1200", by);
        if (!takes_next(spec, 4)) continue;
        const Case c{.spec = spec,
                     .heads_q = 2,
                     .seqlen_q = decodes ? 2 : 70,
                     .seqlen_k = 2000,
                     .lengths_k = {2000},
                     .data = Data::plain,
                     .seed = ++seed};
        SCOPED_TRACE(c.str());
        try {
          expect_right(c, varied);
        } catch (const Prebuilt&) {
        }
      }
}

TEST_P(FarScores, OfRandomDataToo) {
  for (const DType dtype : own_dtypes())
    for (const float scale : {1e3f, 1e6f, 1e10f, 1e30f}) {
      Case c = {
          .spec = forward_spec(dtype, 64, {CausalMask{}}), .heads_q = 2, .seqlen_q = 150, .seqlen_k = 200};
      c.softmax_scale = scale;
      SCOPED_TRACE(c.str());
      Workload workload(on(), c);
      workload.kernel(on().engine()).launch(workload.args());
      EXPECT_TRUE(workload.fetch());
      const verify::Report report = workload.report();
      EXPECT_EQ(report.wrong, 0) << report.str();
      EXPECT_EQ(report.undecided > 0, on().is_cuda() && scale > 1e3f) << report.str();
    }
}

// A row whose scores are all NaN is NaN, too, where its keys are divided into parts, of which none has a
// largest score.
TEST_P(FarScores, ARowOfNotANumberInPartsIsNaN) {
  for (const Operation op : {Operation::decode, Operation::forward})
    for (const bool batch_invariant : {false, true}) {
      AttentionSpec spec = forward_spec(DType::bf16, 64);
      spec.op = op;
      spec.batch_invariant = batch_invariant;
      Workload workload(
          on(),
          {.spec = spec, .heads_q = 2, .heads_kv = 1, .seqlen_q = 1, .seqlen_k = 5000, .data = Data::plain});
      const Tensor q = workload.q().on_host();
      verify::store_element(q.data, q.dtype, q.strides[2], std::numeric_limits<float>::quiet_NaN());
      workload.q().upload();
      workload.reset();
      workload.kernel(on().engine()).launch(workload.args());
      EXPECT_TRUE(workload.fetch());
      const Tensor o = *workload.host_args().o, lse = *workload.host_args().lse;
      for (int head = 0; head < 2; ++head) {
        EXPECT_EQ(std::isnan(verify::load_element(lse.data, lse.dtype, head * lse.strides[1])), head == 1);
        for (int c = 0; c < 64; ++c)
          EXPECT_EQ(std::isnan(verify::load_element(o.data, o.dtype, head * o.strides[2] + c)), head == 1);
      }
    }
}

// For a score beyond float32 the result is NaN.
TEST_P(FarScores, AScoreBeyondFloat32IsNaN) {
  for (const DType dtype : own_dtypes()) {
    if (dtype == DType::fp16) continue;  // products of fp16 are never beyond float32
    Workload workload(on(),
                      {.spec = forward_spec(dtype, 64), .seqlen_q = 3, .seqlen_k = 100, .data = Data::plain});
    for (GuardedTensor* tensor : {&workload.q(), &workload.k()}) {
      const Tensor t = tensor->on_host();
      verify::store_element(t.data, t.dtype, 1 * t.strides[1], 1e30f);  // row 1, key 1
      tensor->upload();
    }
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.fetch());
    const Tensor o = *workload.host_args().o, lse = *workload.host_args().lse;
    for (int row = 0; row < 3; ++row) {
      if (gives_up(1e27) && row != 1) continue;
      EXPECT_EQ(std::isnan(verify::load_element(lse.data, lse.dtype, row)), row == 1);
      for (int c = 0; c < 64; ++c)
        EXPECT_EQ(std::isnan(verify::load_element(o.data, o.dtype, row * o.strides[1] + c)), row == 1);
    }
  }
}

FLASHJIT_ON_EVERY_DEVICE(FarScores);

}  // namespace
}  // namespace flashjit::testing_support
