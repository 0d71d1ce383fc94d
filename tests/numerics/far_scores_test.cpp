// Scores so far from 0 that float32 has few or no bits left below them. The
// keys with a row's maximum share its weight, and the others get none.
// GPU kernels return NaN if |score * log2(e)| exceeds 2^26.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

class FarScores : public ComputesOnEveryDevice {
 protected:
  // Key j's score is sign * level(j) * 2^20, exactly.
  static double level(std::int64_t key) { return 1 + static_cast<double>(key / 37 % 8) / 8; }

  static void set_scores(Workload& workload, double sign) {
    for (const auto& [tensor, is_q] : {std::pair{&workload.q(), true}, {&workload.k(), false}}) {
      const Tensor t = tensor->on_host();
      for (std::int64_t row = 0; row < t.shape[1]; ++row)
        for (std::int64_t head = 0; head < t.shape[2]; ++head)
          for (std::int64_t c = 0; c < t.shape[3]; ++c) {
            const double value = is_q ? 1024 : sign * 1024 * level(row);
            verify::store_element(t.data, t.dtype, row * t.strides[1] + head * t.strides[2] + c,
                                  c == 3 ? static_cast<float>(value) : 0.0f);
          }
      tensor->upload();
    }
  }

  bool gives_up(double score) { return on().is_cuda() && std::abs(score) * std::numbers::log2e > 0x1p26; }
  // GPU kernels compare scores that are already scaled.
  bool does_not_see(double score) {
    return on().is_cuda() && score * std::numbers::log2e < std::numeric_limits<float>::lowest();
  }

  // Causal: row i sees the keys up to i + seqlen_k - seqlen_q.
  void expect_shared_maxima(Workload& workload, double sign, double scale) {
    EXPECT_TRUE(workload.fetch());
    const Tensor v = *workload.host_args().v, o = *workload.host_args().o, lse = *workload.host_args().lse;
    const double unit = o.dtype == DType::bf16 ? 0x1p-8 : o.dtype == DType::fp16 ? 0x1p-11 : 0x1p-20;
    for (std::int64_t row = 0; row < o.shape[1]; ++row) {
      double top = -HUGE_VAL;
      std::vector<std::int64_t> sharing;
      for (std::int64_t key = 0; key <= row + v.shape[1] - o.shape[1]; ++key) {
        if (sign * level(key) > top) sharing.clear();
        top = std::max(top, sign * level(key));
        if (sign * level(key) == top) sharing.push_back(key);
      }
      const auto count = static_cast<double>(sharing.size());
      for (std::int64_t head = 0; head < o.shape[2]; ++head) {
        const std::int64_t head_kv = head * v.shape[2] / o.shape[2];
        for (std::int64_t c = 0; c < o.shape[3]; ++c) {
          double sum = 0, magnitude = 0;
          for (const std::int64_t key : sharing) {
            const double value =
                verify::load_element(v.data, v.dtype, key * v.strides[1] + head_kv * v.strides[2] + c);
            sum += value, magnitude += std::abs(value);
          }
          const double actual =
              verify::load_element(o.data, o.dtype, row * o.strides[1] + head * o.strides[2] + c);
          if (does_not_see(top * 0x1p20 * scale))
            ASSERT_EQ(actual, 0);
          else if (gives_up(top * 0x1p20 * scale))
            ASSERT_TRUE(std::isnan(actual));
          else
            ASSERT_NEAR(actual, sum / count, 4 * unit * magnitude / count)
                << "row " << row << ", head " << head << ", dim " << c;
        }
        const double expected = top * 0x1p20 * scale + std::log(count);
        const double actual = verify::load_element(lse.data, lse.dtype, head * lse.strides[1] + row);
        if (gives_up(expected) && !does_not_see(expected)) {
          ASSERT_TRUE(std::isnan(actual));
          continue;
        }
        if (expected > std::numeric_limits<float>::max() || expected < std::numeric_limits<float>::lowest())
          ASSERT_EQ(actual, std::copysign(HUGE_VAL, expected));
        else
          ASSERT_NEAR(actual, expected, 0x1p-20 * (std::abs(expected) + 1))
              << "row " << row << ", head " << head;
      }
    }
  }
};

TEST_P(FarScores, KeysOfARowsMaximumShareIt) {
  const auto many = on().is_cuda() ? nullptr : on().make_engine({.num_threads = 24});
  for (const DType dtype : own_dtypes())
    for (const int dim : {64, 128})
      for (const int rows : {70, 1}) {
        const Case c = {.spec = forward_spec(dtype, dim, {CausalMask{}}),
                        .heads_q = 2,
                        .seqlen_q = rows,
                        .seqlen_k = rows == 1 ? 2000 : 330,
                        .data = Data::plain};
        for (const double sign : {1.0, -1.0})
          // At the first scale even a rounded offset gives the
          // right result; at the last one, lse is beyond float32.
          for (const double scale : {0x1p-8, 0x1p-4, 0x1p0, 0x1p11, 0x1p60, 0x1p120}) {
            Case scaled = c;
            scaled.softmax_scale = static_cast<float>(scale);
            SCOPED_TRACE(scaled.str() + " sign " + std::to_string(sign));
            Workload workload(on(), scaled);
            set_scores(workload, sign);
            // With many threads a row's keys are processed in parts.
            Engine& engine = rows == 1 && many ? *many : on().engine();
            workload.reset();
            workload.kernel(engine).launch(workload.args());
            expect_shared_maxima(workload, sign, scale);
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
