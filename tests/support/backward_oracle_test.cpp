// Tests the oracle of backward: its gradients against central finite differences of the forward's oracle, so
// that kernels and oracle cannot share a mistake, and planted defects that its bound must catch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/random_masks.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::backward_test {
namespace {

using namespace verify;

struct Array {
  std::vector<float> values;
  Tensor view;
  explicit Array(std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    values.resize(static_cast<std::size_t>(count) + 1);
    view = Tensor::contiguous(values.data(), DType::fp32, {}, shape);
  }
};

OracleOptions one_thread() {
  OracleOptions options;
  options.num_threads = 1;
  return options;
}

struct Problem {
  AttentionSpec spec;
  Shape shape;
  std::vector<std::int32_t> starts_q, starts_k;
  MaskData masks;
  Array q, k, v, o, lse, d_o, dlse, dq, dk, dv;
  // With scores: tables `slope` [heads_q] and `bias` [heads_q, 5], and sink logits, with their gradients.
  Array slope{{4}}, bias{{4, 5}}, sinks{{4}}, d_slope{{4}}, d_bias{{4, 5}}, d_sinks{{4}};
  std::vector<NamedArgument> named;
  AttentionArgs args;

  static AttentionSpec spec_of(std::vector<Mask> mask, bool dropout, bool varlen,
                               const std::vector<std::string>& score) {
    AttentionSpec spec;
    spec.op = Operation::backward;
    spec.dtype = DType::fp32;
    spec.head_dim = 16, spec.head_dim_v = 8;
    spec.mask = std::move(mask);
    spec.dropout = dropout, spec.varlen = varlen;
    if (!score.empty()) {
      spec.score = score;
      spec.tables = {
          {"slope", DType::fp32, {{.kind = TableDimension::Kind::heads_q}}, true},
          {"bias",
           DType::fp32,
           {{.kind = TableDimension::Kind::heads_q}, {.kind = TableDimension::Kind::number, .size = 5}},
           true}};
      spec.sink_logits = true;
    }
    return spec.validated();
  }
  std::vector<std::int64_t> sizes(std::int64_t rows, std::int64_t heads, std::int64_t dim) const {
    const std::int64_t batch = shape.batch;
    return spec.varlen ? std::vector{batch * rows - 3, heads, dim} : std::vector{batch, rows, heads, dim};
  }
  std::vector<std::int64_t> sizes_of_rows() const {
    const std::int64_t batch = shape.batch, rows = shape.seqlen_q, heads = shape.num_heads_q;
    return spec.varlen ? std::vector{heads, batch * rows - 3} : std::vector{batch, heads, rows};
  }

  Problem(std::vector<Mask> mask, bool dropout, bool varlen, std::uint64_t seed,
          const std::vector<std::string>& score = {})
      : spec(spec_of(std::move(mask), dropout, varlen, score)),
        shape{.batch = 2, .seqlen_q = 9, .seqlen_k = 12, .num_heads_q = 4, .num_heads_kv = 2},
        starts_q{0, 9, 15},
        starts_k{0, 12, 21},
        q(sizes(9, 4, 16)),
        k(sizes(12, 2, 16)),
        v(sizes(12, 2, 8)),
        o(sizes(9, 4, 8)),
        lse(sizes_of_rows()),
        d_o(sizes(9, 4, 8)),
        dlse(sizes_of_rows()),
        dq(sizes(9, 4, 16)),
        dk(sizes(12, 2, 16)),
        dv(sizes(12, 2, 8)) {
    const RandomOptions plain{.outlier_every = 0, .long_row_every = 0};
    for (Array* array : {&q, &k, &v, &d_o}) fill_random(array->view, seed++, plain);
    for (std::size_t i = 0; i < dlse.values.size(); ++i)
      dlse.values[i] = static_cast<float>(i % 5) / 4 - 0.5f;
    args = {.q = q.view, .k = k.view, .v = v.view, .o = o.view, .lse = lse.view};
    args.d_o = d_o.view, args.dlse = dlse.view;
    args.dq = dq.view, args.dk = dk.view, args.dv = dv.view;
    if (!score.empty()) {
      for (Array* array : {&slope, &bias, &sinks}) fill_random(array->view, seed++, plain);
      named = {
          {"slope", slope.view}, {"bias", bias.view}, {"d_slope", d_slope.view}, {"d_bias", d_bias.view}};
      args.named = named;
      args.sink_logits = sinks.view, args.d_sink_logits = d_sinks.view;
    }
    if (dropout) args.dropout_p = 0.3, args.dropout_seed = seed, args.dropout_offset = 7;
    if (varlen) {
      args.cu_seqlens_q = Tensor::contiguous(starts_q.data(), DType::int32, {}, {3});
      args.cu_seqlens_k = Tensor::contiguous(starts_k.data(), DType::int32, {}, {3});
    }
    masks = random_mask_data(spec, shape, seed, {.hard = true});
    masks.fit_lengths(spec, shape, args);
    for (MaskTable& table : masks.tables) args.*table.argument = table.view();
    masks.set_sizes(args);
    fill_forward(spec, args);
  }

  // The loss whose gradients do and dlse are, in float64.
  double loss() const {
    AttentionSpec forward = spec;
    forward.op = Operation::forward;
    for (DeclaredTable& table : forward.tables) table.grad = false;
    double sum = 0;
    forward_oracle(forward, args, one_thread()).compute([&](const Expected& expected) {
      const std::vector<float>& by = expected.output == 0 ? d_o.values : dlse.values;
      for (std::size_t i = 0; i < expected.values.size(); ++i)
        if (std::isfinite(expected.values[i]))
          sum += expected.values[i] * by[static_cast<std::size_t>(expected.index) + i];
    });
    return sum;
  }

  // The oracle's gradients become the results.
  void take_gradients() {
    backward_oracle(spec, args, one_thread()).compute([&](const Expected& expected) {
      // Tables are in the order of their names.
      Array* const outputs[] = {&dq, &dk, &dv, &d_bias, &d_slope, &d_sinks};
      Array& to = *outputs[expected.output];
      for (std::size_t i = 0; i < expected.values.size(); ++i)
        to.values[static_cast<std::size_t>(expected.index) + i] = static_cast<float>(expected.values[i]);
    });
  }
};

const std::vector<std::vector<Mask>> masks = {
    {},
    {CausalMask{}},
    {CausalMask{CausalAlign::top_left}},
    {SlidingWindowMask{}},
    {SlidingWindowMask{.sinks = true}},
    {PaddingMask{}},
    {BlockSparseMask{.block_m = 16, .block_n = 16}},
    {TreeMask{}},
    {CausalMask{}, PaddingMask{}},
};

// The gradient's element i against a central difference of the loss.
void expect_difference(const Problem& problem, const char* name, Array& of, const Array& gradient,
                       std::size_t i) {
  float& x = of.values[i];
  const float before = x;
  constexpr float step = 0x1p-10f;
  x = before + step;
  const double above = x, loss_above = problem.loss();
  x = before - step;
  const double difference = (loss_above - problem.loss()) / (above - x);
  x = before;
  EXPECT_NEAR(gradient.values[i], difference, 2e-5 * (1 + std::abs(difference)))
      << problem.spec.to_json() << " " << name << " " << i;
}

TEST(BackwardOracle, AgreesWithFiniteDifferences) {
  std::uint64_t seed = 1;
  for (const auto& mask : masks)
    for (const bool dropout : {false, true})
      for (const bool varlen : {false, true}) {
        Problem problem(mask, dropout, varlen, seed += 10);
        problem.take_gradients();
        const struct {
          const char* name;
          Array *of, *gradient;
        } pairs[] = {{"dq", &problem.q, &problem.dq},
                     {"dk", &problem.k, &problem.dk},
                     {"dv", &problem.v, &problem.dv}};
        for (const auto& [name, of, gradient] : pairs)
          for (std::size_t i = seed % 7; i + 1 < of->values.size(); i += 13)
            expect_difference(problem, name, *of, *gradient, i);
      }
}

// Through formulas, whose derivatives the oracle computes by dual numbers: by q, k and what formulas read.
TEST(BackwardOracle, FormulasAgreeWithFiniteDifferences) {
  const std::vector<std::vector<std::string>> scores = {
      {"score + slope[head] * (key - position) / 4 + bias[key % 5]"},
      {"2 * tanh(score / 2) * (1 + slope[head] / 4)", "score + bias[min(max(position - key, 0), 3)]"},
      {"exp(score / 4) + log(2 + abs(bias[1])) * score", "score * sqrt(1 + slope[2] * slope[head_kv])"},
      {"row % 3 == 0 ? score * slope[0] : max(score, bias[row]) - min(score / 2, slope[head])"},
      {"score / (2 + tanh(bias[key - row])) - (key == 4 ? inf : sqrt(1 + (score - slope[head]) * (score - "
       "slope[head])))"},
      {"-(bias[floor(score)] - slope[head] * score)"},
  };
  std::uint64_t seed = 700;
  for (const auto& score : scores)
    for (const bool varlen : {false, true}) {
      Problem problem({CausalMask{}}, varlen, varlen, seed += 10, score);
      problem.take_gradients();
      const struct {
        const char* name;
        Array *of, *gradient;
        std::size_t step;
      } pairs[] = {{"dq", &problem.q, &problem.dq, 23},
                   {"dk", &problem.k, &problem.dk, 23},
                   {"d_slope", &problem.slope, &problem.d_slope, 1},
                   {"d_bias", &problem.bias, &problem.d_bias, 3},
                   {"d_sink_logits", &problem.sinks, &problem.d_sinks, 1}};
      for (const auto& [name, of, gradient, step] : pairs)
        for (std::size_t i = 0; i + 1 < of->values.size(); i += step)
          expect_difference(problem, name, *of, *gradient, i);
    }
}

TEST(BackwardOracle, BoundCatchesDefects) {
  Problem problem({CausalMask{}}, false, false, 5);
  problem.take_gradients();
  EXPECT_TRUE(verify_outputs(problem.spec, problem.args).ok());
  for (Array* gradient : {&problem.dq, &problem.dk, &problem.dv}) {
    const std::vector<float> right = gradient->values;
    for (float& value : gradient->values) value *= 1.001f;
    EXPECT_FALSE(verify_outputs(problem.spec, problem.args).ok());
    gradient->values = right;
  }
  Problem learned({CausalMask{}}, false, false, 5, {"score + slope[head] * bias[key % 5]"});
  learned.take_gradients();
  EXPECT_TRUE(verify_outputs(learned.spec, learned.args).ok());
  for (Array* gradient : {&learned.d_slope, &learned.d_bias, &learned.d_sinks}) {
    const std::vector<float> right = gradient->values;
    gradient->values[2] *= 1.001f;
    EXPECT_FALSE(verify_outputs(learned.spec, learned.args).ok());
    gradient->values = right;
  }
  problem.args.softmax_scale = 0.2502f;  // instead of 0.25
  EXPECT_FALSE(verify_outputs(problem.spec, problem.args).ok());
  problem.args.softmax_scale.reset();
  problem.args.dlse.reset();
  EXPECT_FALSE(verify_outputs(problem.spec, problem.args).ok());
}

// The weights of scores so far from 0 that float32 cannot hold their lse are those of the softmax.
TEST(BackwardOracle, FarScoresHaveTheirSoftmax) {
  // All keys are equal: each of 12 gets the same share of do, of two heads.
  Problem equal({}, false, false, 5, {"0 * (score + slope[head] * bias[0]) - 1e9"});
  std::fill(equal.sinks.values.begin(), equal.sinks.values.end(), -HUGE_VALF);
  fill_forward(equal.spec, equal.args);
  equal.take_gradients();
  for (std::int64_t i = 0; i + 1 < static_cast<std::int64_t>(equal.dv.values.size()); ++i) {
    const std::int64_t column = i % 8, head_kv = i / 8 % 2, batch = i / 8 / 2 / 12;
    double sum = 0;
    for (std::int64_t row = 0; row < 9; ++row)
      for (std::int64_t head = 2 * head_kv; head < 2 * head_kv + 2; ++head)
        sum += equal.d_o.values[static_cast<std::size_t>(((batch * 9 + row) * 4 + head) * 8 + column)];
    EXPECT_NEAR(equal.dv.values[static_cast<std::size_t>(i)], sum / 12, 1e-5);
  }
  EXPECT_TRUE(verify_outputs(equal.spec, equal.args).ok());
  for (const float wrong : {338939.0f, std::numeric_limits<float>::quiet_NaN()}) {
    const std::vector<float> right = equal.dv.values;
    equal.dv.values[3] = wrong;
    EXPECT_EQ(verify_outputs(equal.spec, equal.args).wrong, 1);
    equal.dv.values = right;
  }
  // A kernel's exp(score - lse), with an lse of float32, is off by more.
  for (const float scale : {3e4f, 1e7f, 1e10f}) {
    Problem far({CausalMask{}}, false, false, 5);
    far.args.softmax_scale = scale;
    fill_forward(far.spec, far.args);
    far.take_gradients();
    EXPECT_TRUE(verify_outputs(far.spec, far.args).ok()) << scale;
    for (float& value : far.dv.values) value *= 1.001f;
    EXPECT_FALSE(verify_outputs(far.spec, far.args).ok()) << scale;
  }
}

// A merge's lse is that of other keys, too.
TEST(BackwardOracle, AMergesLseMakesWeightsSmaller) {
  Problem alone({CausalMask{}}, false, false, 5), part({CausalMask{}}, false, false, 5);
  for (float& lse : part.lse.values) lse += std::log(2.0f);
  alone.take_gradients();
  part.take_gradients();
  for (std::size_t i = 0; i + 1 < alone.dv.values.size(); ++i)
    EXPECT_NEAR(part.dv.values[i], alone.dv.values[i] / 2, 1e-5);
  EXPECT_TRUE(verify_outputs(part.spec, part.args).ok());
}

// A row whose do and dlse are 0 gives exactly 0.
TEST(BackwardOracle, RowsWithoutGradientsGiveNothing) {
  Problem problem({CausalMask{}}, false, false, 5, {"score + slope[head] * bias[key % 5]"});
  std::fill(problem.d_o.values.begin(), problem.d_o.values.end(), 0.0f);
  std::fill(problem.dlse.values.begin(), problem.dlse.values.end(), 0.0f);
  problem.take_gradients();
  EXPECT_TRUE(verify_outputs(problem.spec, problem.args).ok());
  for (Array* gradient : {&problem.dq, &problem.dk, &problem.dv, &problem.d_slope, &problem.d_sinks}) {
    EXPECT_EQ(gradient->values[0], 0);
    gradient->values[0] = 1e-38f;
    EXPECT_FALSE(verify_outputs(problem.spec, problem.args).ok());
    gradient->values[0] = 0;
  }
}

// A row with a score of +inf has no softmax: whatever its other scores are, no key that it sees can be told.
TEST(BackwardOracle, ARowWithoutSoftmaxReachesTheKeysThatItSees) {
  Problem problem({CausalMask{}}, false, false, 5,
                  {"(row == 2 ? key == 0 ? inf : -inf : score) + slope[head] * bias[key % 5]"});
  problem.take_gradients();
  for (std::size_t i = 0; i + 1 < problem.dv.values.size(); ++i) {
    const std::size_t key = i / 8 / 2 % 12;
    EXPECT_EQ(std::isnan(problem.dv.values[i]), key <= 2 + 12 - 9) << "key " << key;
  }
}

}  // namespace
}  // namespace flashjit::backward_test
