// Scores so far from 0 that float32 has few or no bits left below them: the keys with a row's largest score
// share its weight, and the others get none. The true softmax, worked out by hand.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <vector>

#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {

// A forward's or a decode's with one batch entry and the mask causal: row i sees the keys up to
// i + seqlen_k - seqlen_q. Keys may lie in pages. An 8-bit dtype must hold 8 to 15.
class SharedMaxima {
 public:
  SharedMaxima(Workload& workload, bool is_cuda) : workload_(workload), is_cuda_(is_cuda) {}

  // Key j's score, before the scale, becomes sign * level(j) * 2^20, exactly.
  void set_scores(double sign) {
    sign_ = sign;
    const AttentionSpec& spec = workload_.given().spec;
    const Tensor q = workload_.q().on_host(), k = workload_.k().on_host();
    for (std::int64_t head = 0; head < q.shape[2]; ++head)
      for (std::int64_t row = 0; row < q.shape[1]; ++row)
        set_row(q, row * q.strides[1] + head * q.strides[2], 1024);
    for (std::int64_t head = 0; head < k.shape[2]; ++head)
      for (std::int64_t key = 0; key < keys(); ++key)
        set_row(k, index(k, key) + head * k.strides[2],
                sign * level(key) * (spec.kv_dtype ? 1024 / scale_of_keys : 1024));
    workload_.q().upload();
    workload_.k().upload();
    if (!spec.kv_dtype) return;
    fill(workload_.tensor(&AttentionArgs::k_scale), scale_of_keys);
    fill(workload_.tensor(&AttentionArgs::v_scale), 1);
  }

  // After a launch with this scale.
  void expect(double scale) {
    EXPECT_TRUE(workload_.fetch());
    const Tensor v = *workload_.host_args().v, o = *workload_.host_args().o, lse = *workload_.host_args().lse;
    const double unit = o.dtype == DType::bf16 ? 0x1p-8 : o.dtype == DType::fp16 ? 0x1p-11 : 0x1p-20;
    for (std::int64_t row = 0; row < o.shape[1]; ++row) {
      double top = -HUGE_VAL;
      std::vector<std::int64_t> sharing;
      for (std::int64_t key = 0; key <= row + keys() - o.shape[1]; ++key) {
        if (sign_ * level(key) > top) sharing.clear();
        top = std::max(top, sign_ * level(key));
        if (sign_ * level(key) == top) sharing.push_back(key);
      }
      const auto count = static_cast<double>(sharing.size());
      for (std::int64_t head = 0; head < o.shape[2]; ++head) {
        const std::int64_t head_kv = head * v.shape[2] / o.shape[2];
        for (std::int64_t c = 0; c < o.shape[3]; ++c) {
          double sum = 0, magnitude = 0;
          for (const std::int64_t key : sharing) {
            const double value =
                verify::load_element(v.data, v.dtype, index(v, key) + head_kv * v.strides[2] + c);
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

 private:
  static constexpr double scale_of_keys = 128;

  static double level(std::int64_t key) { return 1 + static_cast<double>(key / 37 % 8) / 8; }
  static void set_row(const Tensor& t, std::int64_t first, double value) {
    for (std::int64_t c = 0; c < t.shape[3]; ++c)
      verify::store_element(t.data, t.dtype, first + c, c == 3 ? static_cast<float>(value) : 0.0f);
  }
  static void fill(GuardedTensor& scales, double value) {
    const Tensor t = scales.on_host();
    const auto size = [&](int i) { return i < t.rank ? t.shape[i] : 1; };
    for (std::int64_t i = 0; i < size(0); ++i)
      for (std::int64_t j = 0; j < size(1); ++j)
        for (std::int64_t l = 0; l < size(2); ++l)
          verify::store_element(
              t.data, t.dtype,
              i * t.strides[0] + (t.rank > 1 ? j * t.strides[1] : 0) + (t.rank > 2 ? l * t.strides[2] : 0),
              static_cast<float>(value));
    scales.upload();
  }

  std::int64_t keys() const { return workload_.given().seqlen_k; }
  // A key of the first head.
  std::int64_t index(const Tensor& t, std::int64_t key) const {
    if (!workload_.given().spec.paged) return key * t.strides[1];
    const Tensor table = *workload_.host_args().page_table;
    const std::int64_t page = static_cast<const std::int32_t*>(table.data)[key / t.shape[1]];
    return page * t.strides[0] + key % t.shape[1] * t.strides[1];
  }

  // GPU kernels return NaN if |score * log2(e)| exceeds 2^26.
  bool gives_up(double score) const { return is_cuda_ && std::abs(score) * std::numbers::log2e > 0x1p26; }
  // GPU kernels compare scores that are already scaled.
  bool does_not_see(double score) const {
    return is_cuda_ && score * std::numbers::log2e < std::numeric_limits<float>::lowest();
  }

  Workload& workload_;
  const bool is_cuda_;
  double sign_ = 1;
};

// A spec whose keys before `near` have scores that are `by` lower.
inline AttentionSpec with_far_keys(AttentionSpec spec, const char* near, const char* by) {
  spec.score = {std::string("key < ") + near + " ? score - " + by + " : score"};
  return spec.validated();
}

}  // namespace flashjit::testing_support
