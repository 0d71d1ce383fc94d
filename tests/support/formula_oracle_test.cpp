// The oracle's evaluation of formulas: by hand, against loops that say the same, and its bounds.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "codegen/formulas/write_out.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/spec_fields.hpp"
#include "tools/verify/formula.hpp"
#include "tools/verify/oracle.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::verify {
namespace {

constexpr double unbounded = std::numeric_limits<double>::infinity();

// A launch of fp32 [batch, seqlen, heads, 8] with tables and scalars.
struct Launch {
  static constexpr int batch = 2, seqlen_q = 6, seqlen_k = 9, heads = 4, heads_kv = 2, dim = 8;
  AttentionSpec spec{.dtype = DType::fp32, .head_dim = dim};
  std::vector<float> q = std::vector<float>(batch * seqlen_q * heads * dim),
                     k = std::vector<float>(batch * seqlen_k * heads_kv * dim), v = k, o = q,
                     lse = std::vector<float>(batch * heads * seqlen_q);
  std::vector<float> slope = {0.5f, 0.25f, 0.125f, 1}, sinks = {0.5f, -1, 3, -40};
  std::vector<std::int32_t> document = {0, 0, 0, 1, 1, 1, 2, 2, 2, 5, 5, 5, 5, 5, 6, 6, 6, 6};
  std::vector<std::int8_t> bytes = {-128, 127, 3};
  std::vector<NamedArgument> named;
  AttentionArgs args;

  Launch(std::vector<std::string> masks, std::vector<std::string> scores, bool sink_logits = false) {
    for (std::string& mask : masks) spec.mask.push_back(FormulaMask{std::move(mask)});
    spec.score = std::move(scores);
    spec.sink_logits = sink_logits;
    declare("slope", DType::fp32, {"heads_q"}, slope.data(), {heads});
    declare("document", DType::int32, {"batch", "seqlen_k"}, document.data(), {batch, seqlen_k});
    declare("bytes", DType::int8, {"n"}, bytes.data(), {3});
    spec.scalars = {{"cap", DType::fp32}, {"reach", DType::int32}};
    named.emplace_back("cap", 2.5);
    named.emplace_back("reach", -3);
    // Declarations that no formula reads are refused elsewhere; here all launches have the same.
    spec.score.push_back("score + 0 * (slope[head] + document[key] + bytes[0] + cap + reach)");
    write_out_formulas(spec);
    spec.score.pop_back();
    spec = without_defaults(std::move(spec));
    spec.head_dim_v = dim;
    const auto tensor = [](std::vector<float>& data, std::initializer_list<std::int64_t> shape) {
      return Tensor::contiguous(data.data(), DType::fp32, {}, shape);
    };
    args.q = tensor(q, {batch, seqlen_q, heads, dim});
    args.k = tensor(k, {batch, seqlen_k, heads_kv, dim});
    args.v = tensor(v, {batch, seqlen_k, heads_kv, dim});
    args.o = tensor(o, {batch, seqlen_q, heads, dim});
    args.lse = tensor(lse, {batch, heads, seqlen_q});
    if (sink_logits) args.sink_logits = tensor(sinks, {heads});
    args.named = named;
    fill_random(*args.q, 1);
    fill_random(*args.k, 2);
    fill_random(*args.v, 3);
  }

  void declare(const char* name, DType dtype, std::initializer_list<const char*> shape, void* data,
               std::initializer_list<std::int64_t> sizes) {
    DeclaredTable table{name, dtype};
    for (const char* dimension : shape) table.shape.push_back(dimension_of(dimension));
    spec.tables.push_back(table);
    named.emplace_back(name, Tensor::contiguous(data, dtype, {}, sizes));
  }

  // Computes o and lse in float32 by the definition. `keep(b, h, i, j)`, `score(s, b, h, i, j)`.
  void compute(const auto& keep, const auto& score) {
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < heads; ++h)
        for (int i = 0; i < seqlen_q; ++i) {
          std::vector<float> scores(seqlen_k, -std::numeric_limits<float>::infinity());
          float top = spec.sink_logits ? sinks[h] : -std::numeric_limits<float>::infinity();
          for (int j = 0; j < seqlen_k; ++j) {
            if (!keep(b, h, i, j)) continue;
            float s = 0;
            for (int d = 0; d < dim; ++d)
              s += q[((b * seqlen_q + i) * heads + h) * dim + d] *
                   k[((b * seqlen_k + j) * heads_kv + h / 2) * dim + d];
            scores[j] = score(s / std::sqrt(float(dim)), b, h, i, j);
            top = std::max(top, scores[j]);
          }
          float sum = spec.sink_logits ? std::exp(sinks[h] - top) : 0;
          float* const row = &o[((b * seqlen_q + i) * heads + h) * dim];
          std::fill_n(row, dim, 0.0f);
          for (int j = 0; j < seqlen_k; ++j) {
            if (!(scores[j] > -std::numeric_limits<float>::infinity())) continue;
            const float weight = std::exp(scores[j] - top);
            sum += weight;
            for (int d = 0; d < dim; ++d)
              row[d] += weight * v[((b * seqlen_k + j) * heads_kv + h / 2) * dim + d];
          }
          for (int d = 0; d < dim; ++d) row[d] = sum > 0 ? row[d] / sum : 0;
          lse[(b * heads + h) * seqlen_q + i] =
              sum > 0 ? top + std::log(sum) : -std::numeric_limits<float>::infinity();
        }
  }
  bool right() const { return verify_outputs(spec, args).ok(); }
};

const auto every_key = [](int, int, int, int) { return true; };
const auto raw_score = [](float s, int, int, int, int) { return s; };

TEST(FormulaOracle, PlainFloat32IsRightAndPlantedDefectsAreNot) {
  constexpr int shift = Launch::seqlen_k - Launch::seqlen_q;
  Launch alibi({}, {"score - slope[head] * abs(position - key)"});
  const auto slopes = [&](float factor) {
    return [&, factor](float s, int, int h, int i, int j) {
      return s - factor * alibi.slope[h] * std::abs(float(i + shift - j));
    };
  };
  alibi.compute(every_key, slopes(1));
  EXPECT_TRUE(alibi.right());
  alibi.compute(every_key, slopes(1.001f));
  EXPECT_FALSE(alibi.right());

  Launch softcap({}, {"cap * tanh(score / cap)"});
  const auto capped = [](float cap) {
    return [cap](float s, int, int, int, int) { return cap * std::tanh(s / cap); };
  };
  softcap.compute(every_key, capped(2.5f));
  EXPECT_TRUE(softcap.right());
  softcap.compute(every_key, capped(2.501f));
  EXPECT_FALSE(softcap.right());
  softcap.compute(every_key, raw_score);
  EXPECT_FALSE(softcap.right());

  Launch documents({"document[key] == document[position]", "key <= position"}, {});
  const auto same = [&](int distance) {
    return [&, distance](int b, int, int i, int j) {
      return documents.document[b * 9 + j] == documents.document[b * 9 + i + shift] &&
             j <= i + shift - distance;
    };
  };
  documents.compute(same(0), raw_score);
  EXPECT_TRUE(documents.right());
  documents.compute(same(1), raw_score);
  EXPECT_FALSE(documents.right());

  // Two scores, one after the other; a mask made of -inf; head_kv, batch, row, lengths and clamped indices.
  Launch chain({}, {"score * 2 + bytes[key - 4]",
                    "head_kv == 1 && key > row + batch ? -inf : score / (seqlen_q - seqlen_k)"});
  chain.compute(every_key, [&](float s, int b, int h, int i, int j) {
    const float first = s * 2 + chain.bytes[std::clamp(j - 4, 0, 2)];
    return h / 2 == 1 && j > i + b ? -std::numeric_limits<float>::infinity() : first / -3;
  });
  EXPECT_TRUE(chain.right());
}

TEST(FormulaOracle, SinkLogits) {
  for (const bool empty : {false, true}) {
    Launch sinks({empty ? "key < 0" : "key != 3"}, {}, true);
    const auto keep = [empty](int, int, int, int j) { return !empty && j != 3; };
    sinks.compute(keep, raw_score);
    EXPECT_TRUE(sinks.right()) << verify_outputs(sinks.spec, sinks.args).str();
    if (empty) {
      EXPECT_EQ(sinks.lse[0], 0.5f);
    }
    const std::vector<float> before = sinks.sinks;
    sinks.sinks[2] += 0.001f;
    sinks.compute(keep, raw_score);
    sinks.sinks = before;
    EXPECT_FALSE(sinks.right());
  }
}

// A row that padding leaves unused has no softmax for a sink to be part of.
TEST(FormulaOracle, SinkLogitsOfUnusedRows) {
  Launch sinks({}, {}, true);
  sinks.spec.mask = {PaddingMask{}};
  std::vector<std::int32_t> lengths(Launch::batch, Launch::seqlen_q);
  lengths[0] = 2;
  sinks.args.seqlens_q = Tensor::contiguous(lengths.data(), DType::int32, {}, {Launch::batch});
  const auto is_used = [&](int b, int, int i, int) { return i < lengths[static_cast<std::size_t>(b)]; };
  sinks.compute(is_used, raw_score);
  EXPECT_EQ(sinks.lse[2], sinks.sinks[0]);
  EXPECT_FALSE(sinks.right());
  for (int h = 0; h < Launch::heads; ++h)
    for (int i = lengths[0]; i < Launch::seqlen_q; ++i)
      sinks.lse[h * Launch::seqlen_q + i] = -std::numeric_limits<float>::infinity();
  EXPECT_TRUE(sinks.right()) << verify_outputs(sinks.spec, sinks.args).str();
}

// Values of one element by the language's rules.
TEST(FormulaOracle, Arithmetic) {
  const auto holds = [](const std::string& condition) {
    Launch launch({condition}, {});
    const Sequence s{.batch = 1, .seqlen_q = 6, .seqlen_k = 9, .rows = 6, .q_begin = 0, .k_begin = 0};
    return sees(launch.spec, launch.args, s, 3, 2, 7);
  };
  for (const char* condition :
       {"7 / 2 == 3 && -7 / 2 == -3 && 7 / -2 == -3",
        "7 % 3 == 1 && -7 % 3 == -1 && 7 % -3 == 1",
        "key / (row - 2) == 0 && key % (row - 2) == 0",
        "2147483647 + key == -2147483642",
        "(-2147483647 - 1) / -1 == -2147483647 - 1 && (-2147483647 - 1) % -1 == 0",
        "abs(-2147483647 - 1) == -2147483647 - 1 && -(-2147483647 - 1) == -2147483647 - 1",
        "65536 * 65536 == 0 && 65537 * 65537 == 131073",
        "floor(2.7) == 2 && floor(-2.1) == -3 && floor(3.0) == 3",
        "floor(inf) == 2147483647 && floor(-inf) == -2147483647 - 1 && floor(inf - inf) == 0 && floor(1e20) "
        "== 2147483647",
        "min(inf - inf, 3.0) == 3.0 && max(2.0, inf - inf) == 2.0",
        "!(inf - inf == inf - inf) && inf - inf != 0.0",
        "16777216.0 + 1.0 == 16777216.0",
        "16777217 * 1.0 == 16777216.0",
        "0.1 + 0.2 == 0.3",

        "row == 2 && key == 7 && position == 5 && head == 3 && head_kv == 1 && batch == 1",
        "seqlen_q == 6 && seqlen_k == 9 && reach == -3 && cap == 2.5",
        "document[key] == 6 && document[0, key] == 2 && document[5, 100] == 6 && document[-1, -5] == 0",
        "bytes[0] == -128 && bytes[1] == 127 && slope[head] == 1.0 && slope[2] == 0.125",
        "key < 3 ? row < 0 : row < 3",
        "exp(0) == 1.0 && log(1) == 0.0 && sqrt(16) == 4.0 && tanh(0) == 0.0 && log(0) == -inf",
        "abs(-2.5) == 2.5"})
    EXPECT_TRUE(holds(condition)) << condition;
}

// The bounds cover float32, and say when a result cannot be told.
TEST(FormulaOracle, Bounds) {
  const auto final_score = [](const std::string& formula, double score, double error, double& final_error) {
    Launch launch({}, {formula});
    const Sequence s{.batch = 0, .seqlen_q = 6, .seqlen_k = 9, .rows = 6, .q_begin = 0, .k_begin = 0};
    Formulas(launch.spec, launch.args).score(s, 0, 0, 0, {&score, 1}, {&error, 1});
    final_error = error;
    return score;
  };
  double error = 0;
  EXPECT_EQ(final_score("3 * score + 1", 2, 0.5, error), 7);
  EXPECT_NEAR(error, 1.5, 1e-5);
  EXPECT_GE(error, 1.5);
  EXPECT_EQ(final_score("1 / score", 2, 0.5, error), 0.5);
  EXPECT_NEAR(error, 1 / 1.5 - 0.5, 1e-5);
  EXPECT_NEAR(final_score("exp(score)", 1, 0.5, error), std::exp(1), 1e-12);
  EXPECT_NEAR(error, std::exp(1.5) - std::exp(1), 1e-4);
  EXPECT_NEAR(final_score("tanh(score)", 3, 0.5, error), std::tanh(3), 1e-12);
  EXPECT_LT(error, 0.5 * (1 - std::tanh(2.5) * std::tanh(2.5)) + 1e-4);
  EXPECT_GE(error, std::tanh(3) - std::tanh(2.5));
  final_score("log(score)", 2, 0.5, error);
  EXPECT_GE(error, std::log(2 / 1.5));
  EXPECT_LT(error, std::log(2 / 1.5) + 1e-5);
  // Near 1 either value may be right.
  EXPECT_EQ(final_score("score > 1 ? 10 : 2", 1.25, 0.5, error), 10);
  EXPECT_GE(error, 8);
  EXPECT_EQ(final_score("score > 1 ? 10 : 2", 1.75, 0.5, error), 10);
  EXPECT_EQ(error, 0);
  final_score("floor(score)", 1.25, 0.5, error);
  EXPECT_EQ(error, unbounded);
  EXPECT_EQ(final_score("floor(score)", 1.5, 0.25, error), 1);
  EXPECT_EQ(error, 0);
  final_score("slope[floor(score)]", 1.25, 0.5, error);
  EXPECT_EQ(error, unbounded);
  for (const char* formula : {"1 / score", "log(score)", "sqrt(score)", "1e38 * 100 * score"}) {
    final_score(formula, 0.25, 0.5, error);
    EXPECT_EQ(error, unbounded) << formula;
  }
  EXPECT_EQ(final_score("key < 3 ? -inf : score", 1, 0.1, error), -unbounded);
  EXPECT_EQ(error, 0);
  EXPECT_EQ(final_score("(key < 3 ? -inf : score) + score", 1, 0.1, error), -unbounded);
  EXPECT_EQ(error, 0);
}

// Derivatives by hand, with those that are chosen where there is none, and their bounds.
TEST(FormulaOracle, Derivatives) {
  const auto derivative = [](const std::string& formula, double score, double error, double& bound) {
    Launch launch({}, {formula});
    const Sequence s{.batch = 0, .seqlen_q = 6, .seqlen_k = 9, .rows = 6, .q_begin = 0, .k_begin = 0};
    const auto all = Formulas(launch.spec, launch.args).derivatives(s, 0, 0, 0, {&score, 1}, {&error, 1});
    bound = all.errors.front();
    return all.by_score.front();
  };
  double bound = 0;
  EXPECT_EQ(derivative("score + slope[head]", 3, 0.1, bound), 1);
  EXPECT_EQ(bound, 0);
  EXPECT_EQ(derivative("slope[head]", 3, 0.1, bound), 0);
  EXPECT_EQ(bound, 0);
  EXPECT_EQ(derivative("score * score", 3, 0.5, bound), 6);
  EXPECT_GE(bound, 1);
  EXPECT_NEAR(derivative("cap * tanh(score / cap)", 1, 0, bound), 1 - std::pow(std::tanh(0.4), 2), 1e-12);
  EXPECT_NEAR(derivative("log(score)", 4, 0, bound), 0.25, 1e-12);
  EXPECT_NEAR(derivative("sqrt(score)", 4, 0, bound), 0.25, 1e-12);
  EXPECT_NEAR(derivative("exp(score) / score", 2, 0, bound), std::exp(2) / 4, 1e-12);
  for (const auto& [formula, at, slope] : {std::tuple{"abs(score)", 0.0, 0.0},
                                           {"abs(score)", -2.0, -1.0},
                                           {"sqrt(score)", 0.0, 0.0},
                                           {"floor(score) + 0.0", 1.5, 0.0},
                                           {"min(score, 2 * score)", 0.0, 1.0},
                                           {"max(2 * score, score)", 0.0, 2.0},
                                           {"min(score, 2.0)", 3.0, 0.0},
                                           {"score > 1 ? 3 * score : 2 * score", 1.0, 2.0},
                                           {"key == 0 ? 2 * score : log(score - score)", 1.0, 2.0}})
    EXPECT_EQ(derivative(formula, at, 0, bound), slope) << formula;
  // Either side may be right.
  derivative("abs(score)", 0.25, 0.5, bound);
  EXPECT_GE(bound, 2);
  derivative("max(score, 3 * score)", 0.25, 0.5, bound);
  EXPECT_GE(bound, 2);
}

}  // namespace
}  // namespace flashjit::verify
