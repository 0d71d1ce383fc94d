// Gradients of scores so far from 0 that float32 cannot hold their lse: weights are those of the true
// softmax, and rows whose do and dlse are 0 give exactly 0.
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"

namespace flashjit::testing_support {
namespace {

AttentionSpec backward_of(DType dtype, const std::string& fields) {
  return AttentionSpec::from_json(R"({"op": "backward", "head_dim": 64, "dtype": ")" +
                                  std::string(to_string(dtype)) + "\"" + fields + "}");
}

class FarGradients : public ComputesOnEveryDevice {
 protected:
  static void set(Workload& workload, TensorMember member, auto value_of) {
    GuardedTensor& tensor = workload.tensor(member);
    const Tensor t = tensor.on_host();
    for (const verify::Sequence& s : verify::sequences_of(workload.given().spec, workload.host_args()))
      for (int row = 0; row < s.seqlen_q; ++row)
        for (int head = 0; head < workload.given().heads_q; ++head) {
          const bool packed = workload.given().spec.varlen, of_rows = t.rank == (packed ? 2 : 3);
          const std::int64_t at =
              of_rows ? (packed ? head * t.strides[0] : s.batch * t.strides[0] + head * t.strides[1]) +
                            s.q_begin + row
                      : (packed ? 0 : s.batch * t.strides[0]) +
                            (s.q_begin + row) * t.strides[packed ? 0 : 1] + head * t.strides[packed ? 1 : 2];
          for (std::int64_t c = 0; c < (of_rows ? 1 : t.shape[t.rank - 1]); ++c)
            if (const std::optional<float> value = value_of(row))
              verify::store_element(t.data, t.dtype, at + c, *value);
        }
    tensor.upload();
  }
  static void fill_forward(Workload& workload) {
    verify::fill_forward(workload.given().spec, workload.host_args());
    workload.tensor(&AttentionArgs::o).upload();
    workload.tensor(&AttentionArgs::lse).upload();
  }
  void launch(Workload& workload) {
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.fetch());
  }

  // Scores of the rows below 7 are `low`, all of them, so that their keys share the weight. The results must
  // be right for a spec without that: the softmax is the same.
  void expect_shared(const std::string& fields, Case c, double low, bool without_gradient) {
    c.heads_q = 4, c.heads_kv = 2;
    Case plain = c;
    plain.spec = backward_of(c.spec.dtype, fields);
    c.spec = backward_of(
        c.spec.dtype, fields + R"_(, "score": ["score + (row < 7 ? low : 0)"], "scalars": {"low": "fp32"})_");
    c.named.scalars = {{"low", static_cast<float>(low)}};
    if (!takes_next(c.spec)) return;
    SCOPED_TRACE(c.str());
    Workload workload(on(), c);
    const auto of_first_rows = [](float value) {
      return [value](int row) { return row < 7 ? std::optional(value) : std::nullopt; };
    };
    set(workload, &AttentionArgs::q, of_first_rows(0));
    if (without_gradient)
      for (const TensorMember member : {&AttentionArgs::d_o, &AttentionArgs::dlse})
        set(workload, member, of_first_rows(0));
    fill_forward(workload);
    launch(workload);
    EXPECT_TRUE(workload.check());
    verify::fill_forward(plain.spec, workload.host_args());
    const verify::Report report = verify::verify_outputs(plain.spec, workload.host_args());
    EXPECT_TRUE(report.ok()) << report.str();
  }
};

// Its weight is 1 at any score.
TEST_P(FarGradients, OfARowsOnlyKey) {
  for (const DType dtype : own_dtypes())
    for (const double score : {500.0, 16000.0, 185000.0, 1.35e7, 1.1e8, 4.4e9, 3e38, -1.35e7, -3e38}) {
      Case c{.spec = backward_of(dtype, ""), .data = Data::plain, .softmax_scale = 1.0f};
      SCOPED_TRACE(c.str() + " score " + std::to_string(score));
      Workload workload(on(), c);
      const float half = std::sqrt(static_cast<float>(std::abs(score)));
      if (dtype == DType::fp16 && half > 65504) continue;
      set(workload, &AttentionArgs::q, [](int) { return std::optional(0.0f); });
      for (GuardedTensor* tensor : {&workload.q(), &workload.k()}) {
        const Tensor t = tensor->on_host();
        verify::store_element(t.data, t.dtype, 5, tensor == &workload.k() && score < 0 ? -half : half);
        tensor->upload();
      }
      fill_forward(workload);
      launch(workload);
      if (on().is_cuda() && std::abs(score) > 0x1p25) continue;  // the forward has no lse there
      const Tensor dv = *workload.host_args().dv, d_o = *workload.host_args().d_o;
      // Near 0 the rounding of lse counts.
      const double share = std::abs(score) < 1024 ? 0x1p-21 * score : 1e-6;
      for (int i = 0; i < 64; ++i) {
        const double expected = verify::load_element(d_o.data, d_o.dtype, i);
        EXPECT_NEAR(verify::load_element(dv.data, dv.dtype, i), expected, share * std::abs(expected));
      }
    }
}

// A bias of -1e9 or of a dtype's lowest value on whole rows, as left padding has it.
TEST_P(FarGradients, OfRowsWhoseKeysShareTheWeight) {
  const std::vector<int> rows = {30, 5, 0, 70}, keys = {41, 5, 3, 90};
  for (const double low : {-1e9, -3.4e38, -3.3895e38, 5e6})
    for (const bool without_gradient : {false, true}) {
      if (on().is_cuda() && std::abs(low) > 0x1p25 && !without_gradient) continue;
      for (const DType dtype : own_dtypes()) {
        const Case c{
            .spec = {.dtype = dtype}, .batch = 2, .seqlen_q = 70, .seqlen_k = 90, .data = Data::plain};
        expect_shared("", c, low, without_gradient);
        expect_shared(R"(, "mask": ["causal"], "dropout": true)", c, low, without_gradient);
      }
      const Case c{.spec = {.dtype = own_dtypes().back()},
                   .batch = 2,
                   .seqlen_q = 70,
                   .seqlen_k = 90,
                   .data = Data::plain};
      expect_shared(R"(, "mask": ["sliding_window", "padding"])", c, low, without_gradient);
      expect_shared(R"(, "mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 32}])", c, low,
                    without_gradient);
      expect_shared(R"(, "mask": ["causal", "key % 3 != 1"])", c, low, without_gradient);
      expect_shared(
          R"(, "mask": ["causal"], "varlen": true, "grad_dtype": "fp32")",
          {.spec = c.spec, .lengths_q = rows, .lengths_k = keys, .spare_rows = 3, .data = Data::plain}, low,
          without_gradient);
    }
}

// A sink shares the weight, too.
TEST_P(FarGradients, OfASinkAsFarAsTheScores) {
  for (const DType dtype : own_dtypes())
    for (const float low : {-1e6f, 3e7f}) {
      const auto spec = [&](const char* score) {
        return backward_of(
            dtype,
            std::string(R"(, "sink_logits": true, "scalars": {"low": "fp32"}, "score": [")") + score + "\"]");
      };
      Case c{.spec = spec("score + low"),
             .heads_q = 2,
             .heads_kv = 1,
             .seqlen_q = 33,
             .seqlen_k = 70,
             .data = Data::plain};
      c.named.scalars = {{"low", low}};
      Workload workload(on(), c);
      set(workload, &AttentionArgs::q, [](int) { return std::optional(0.0f); });
      const auto set_sinks = [&](float value) {
        const Tensor t = workload.tensor(&AttentionArgs::sink_logits).on_host();
        for (int head = 0; head < 2; ++head)
          verify::store_element(t.data, t.dtype, head * t.strides[0], value);
        workload.tensor(&AttentionArgs::sink_logits).upload();
      };
      set_sinks(low);
      fill_forward(workload);
      launch(workload);
      EXPECT_TRUE(workload.check());
      set_sinks(0);
      const AttentionSpec near = spec("score + 0 * low");
      verify::fill_forward(near, workload.host_args());
      const verify::Report report = verify::verify_outputs(near, workload.host_args());
      EXPECT_TRUE(report.ok()) << report.str();
    }
}

TEST_P(FarGradients, OfRandomDataToo) {
  for (const DType dtype : own_dtypes())
    for (const float scale : {30.0f, 1e3f, 1e6f, 1e10f, 1e30f})
      for (const char* fields :
           {R"(, "mask": ["causal"], "grad_dtype": "fp32")", R"(, "sink_logits": true)"}) {
        if (dtype != own_dtypes().front() && fields[3] == 's') continue;
        Case c = {.spec = backward_of(dtype, fields), .heads_q = 2, .seqlen_q = 50, .seqlen_k = 70};
        c.softmax_scale = scale;
        SCOPED_TRACE(c.str());
        Workload workload(on(), c);
        launch(workload);
        const verify::Report report = workload.report();
        EXPECT_EQ(report.wrong, 0) << report.str();
      }
}

// lse of a merge with twice as many keys: weights are half as large.
TEST_P(FarGradients, OfAMergesLse) {
  for (const double low : {-3000.0, 3000.0}) {
    Case c{.spec =
               backward_of(own_dtypes().front(), R"(, "score": ["score + low"], "scalars": {"low": "fp32"})"),
           .heads_q = 2,
           .heads_kv = 1,
           .seqlen_q = 33,
           .seqlen_k = 70,
           .data = Data::plain};
    c.named.scalars = {{"low", low}};
    Workload workload(on(), c);
    const Tensor lse = workload.tensor(&AttentionArgs::lse).on_host();
    for (int row = 0; row < 33; ++row)
      for (int head = 0; head < 2; ++head) {
        const std::int64_t at = head * lse.strides[1] + row;
        verify::store_element(
            lse.data, lse.dtype, at,
            static_cast<float>(verify::load_element(lse.data, lse.dtype, at) + std::log(2.0)));
      }
    workload.tensor(&AttentionArgs::lse).upload();
    launch(workload);
    EXPECT_TRUE(workload.check());
  }
}

// An lse of NaN makes the gradients of its row and of the keys that it sees NaN, and no others.
TEST_P(FarGradients, NanInLseReachesWhatItsRowSees) {
  for (const DType dtype : own_dtypes()) {
    const Case c{.spec = backward_of(dtype, R"(, "mask": ["causal"])"),
                 .seqlen_q = 60,
                 .seqlen_k = 60,
                 .data = Data::plain};
    Workload workload(on(), c);
    set(workload, &AttentionArgs::lse,
        [](int row) { return row == 20 ? std::optional(std::nanf("")) : std::nullopt; });
    launch(workload);
    if (!on().is_cuda()) {
      EXPECT_EQ(workload.report().wrong, 0) << workload.report().str();
    }
    const AttentionArgs& args = workload.host_args();
    for (int row = 0; row < 60; ++row) {
      const auto at = [&](const Tensor& t) {
        return std::isnan(verify::load_element(t.data, t.dtype, row * t.strides[1] + 3));
      };
      if (row == 20) {
        EXPECT_TRUE(at(*args.dq));
      }
      if (row <= 20) {
        EXPECT_TRUE(at(*args.dk) && at(*args.dv)) << row;
      }
      if (!on().is_cuda() && row != 20) {
        EXPECT_FALSE(at(*args.dq)) << row;
      }
      if (!on().is_cuda() && row > 20) {
        EXPECT_FALSE(at(*args.dk) || at(*args.dv)) << row;
      }
    }
  }
}

FLASHJIT_ON_EVERY_DEVICE(FarGradients);

}  // namespace
}  // namespace flashjit::testing_support
