// Formulas in the CPU kernels, against straightforward float64 code and against the built-in masks. GPUs'
// kernels are held to the oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"
#include "tests/support/test_device.hpp"

namespace flashjit::testing_support {
namespace {

constexpr double none = -std::numeric_limits<double>::infinity();

struct Sizes {
  int batch = 2, heads_q = 4, heads_kv = 2, seqlen_q = 70, seqlen_k = 150;
};

float bf16_of(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  return __builtin_bit_cast(float, (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// Contiguous.
template <class T>
Tensor table(const std::vector<T>& values, DType dtype, std::vector<std::int64_t> shape) {
  Tensor t{};
  t.data = const_cast<T*>(values.data());
  t.dtype = dtype;
  t.rank = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = shape[static_cast<std::size_t>(i)];
    t.strides[i] = stride;
    stride *= shape[static_cast<std::size_t>(i)];
  }
  return t;
}

// One launch of fp32 or bf16 tensors.
class Attention {
 public:
  Attention(const Sizes& sizes, AttentionSpec spec)
      : s_(sizes), spec_(std::move(spec)), bf16_(spec_.dtype == DType::bf16), dim_(spec_.head_dim) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto [values, rows, heads] : {std::tuple{&q_, s_.seqlen_q, s_.heads_q},
                                       {&k_, s_.seqlen_k, s_.heads_kv},
                                       {&v_, s_.seqlen_k, s_.heads_kv}}) {
      values->resize(static_cast<std::size_t>(s_.batch * rows * heads * dim_));
      for (float& x : *values) x = bf16_ ? bf16_of(normal(random)) : normal(random);
    }
    o_.assign(q_.size(), NAN);
    lse_.assign(static_cast<std::size_t>(s_.batch * s_.heads_q * s_.seqlen_q), NAN);
  }

  void run(Engine& engine, std::vector<NamedArgument> named, const std::vector<float>& sinks = {},
           const std::vector<int>& lengths = {}) {
    std::vector<std::uint16_t> halves[4];
    const auto tensor = [&](std::vector<float>& values, int index, int rows, int heads) {
      Tensor t = table(values, spec_.dtype, {s_.batch, rows, heads, dim_});
      if (!bf16_) return t;
      for (const float x : values)
        halves[index].push_back(static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, x) >> 16));
      t.data = halves[index].data();
      return t;
    };
    AttentionArgs args;
    args.q = tensor(q_, 0, s_.seqlen_q, s_.heads_q);
    args.k = tensor(k_, 1, s_.seqlen_k, s_.heads_kv);
    args.v = tensor(v_, 2, s_.seqlen_k, s_.heads_kv);
    args.o = tensor(o_, 3, s_.seqlen_q, s_.heads_q);
    args.lse = table(lse_, DType::fp32, {s_.batch, s_.heads_q, s_.seqlen_q});
    if (!sinks.empty()) args.sink_logits = table(sinks, DType::fp32, {s_.heads_q});
    if (!lengths.empty()) args.seqlens_k = table(lengths, DType::int32, {s_.batch});
    args.named = named;
    const Shape shape{.batch = s_.batch,
                      .seqlen_q = s_.seqlen_q,
                      .seqlen_k = s_.seqlen_k,
                      .num_heads_q = s_.heads_q,
                      .num_heads_kv = s_.heads_kv};
    engine.get(spec_, shape).launch(args);
    if (bf16_)
      for (std::size_t i = 0; i < o_.size(); ++i)
        o_[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(halves[3][i]) << 16);
  }

  // The score of a pair of natural score s; `none` where it is masked.
  using Score = std::function<double(int batch, int head, int row, int key, double s)>;
  void expect(const Score& score, const std::vector<float>& sinks = {},
              const std::vector<int>& lengths = {}) const {
    const int group = s_.heads_q / s_.heads_kv;
    std::vector<double> scores(static_cast<std::size_t>(s_.seqlen_k)), o(static_cast<std::size_t>(dim_));
    for (int b = 0; b < s_.batch; ++b)
      for (int h = 0; h < s_.heads_q; ++h)
        for (int row = 0; row < s_.seqlen_q; ++row) {
          const auto at = [&](int r, int heads, int head, int rows) {
            return static_cast<std::size_t>(((b * rows + r) * heads + head) * dim_);
          };
          const float* const q = &q_[at(row, s_.heads_q, h, s_.seqlen_q)];
          const int keys = lengths.empty() ? s_.seqlen_k : lengths[static_cast<std::size_t>(b)];
          double top = sinks.empty() ? none : sinks[static_cast<std::size_t>(h)], sum = 0;
          for (int key = 0; key < keys; ++key) {
            const float* const k = &k_[at(key, s_.heads_kv, h / group, s_.seqlen_k)];
            double s = 0;
            for (int c = 0; c < dim_; ++c) s += double{q[c]} * k[c];
            scores[static_cast<std::size_t>(key)] = s = score(b, h, row, key, s / std::sqrt(dim_));
            top = std::max(top, s);
          }
          std::fill(o.begin(), o.end(), 0);
          if (!sinks.empty()) sum = std::exp(sinks[static_cast<std::size_t>(h)] - top);
          for (int key = 0; key < keys && top != none; ++key) {
            const double weight = std::exp(scores[static_cast<std::size_t>(key)] - top);
            sum += weight;
            for (int c = 0; c < dim_; ++c)
              o[static_cast<std::size_t>(c)] +=
                  weight * v_[at(key, s_.heads_kv, h / group, s_.seqlen_k) + static_cast<std::size_t>(c)];
          }
          const double lse = sum == 0 ? none : top + std::log(sum), tolerance = bf16_ ? 2e-2 : 2e-4;
          const float got = lse_[static_cast<std::size_t>((b * s_.heads_q + h) * s_.seqlen_q + row)];
          const std::string where = spec_.to_json() + "\nbatch " + std::to_string(b) + ", head " +
                                    std::to_string(h) + ", row " + std::to_string(row);
          if (lse == none) {
            ASSERT_EQ(got, -std::numeric_limits<float>::infinity()) << where;
          } else {
            ASSERT_NEAR(got, lse, tolerance) << where;
          }
          for (int c = 0; c < dim_; ++c)
            ASSERT_NEAR(o_[at(row, s_.heads_q, h, s_.seqlen_q) + static_cast<std::size_t>(c)],
                        sum == 0 ? 0 : o[static_cast<std::size_t>(c)] / sum, tolerance)
                << where << ", column " << c;
        }
  }
  const std::vector<float>& o() const { return o_; }
  const std::vector<float>& lse() const { return lse_; }

 private:
  Sizes s_;
  AttentionSpec spec_;
  bool bf16_;
  int dim_;
  std::vector<float> q_, k_, v_, o_, lse_;
};

class FormulaKernels : public OnEveryDevice {
 protected:
  void SetUp() override {
    OnEveryDevice::SetUp();
    if (!IsSkipped() && on().is_cuda()) GTEST_SKIP() << "the tensors are the host's";
  }
  static AttentionSpec spec_of(const std::string& op, const std::string& dtype, int dim,
                               const std::string& fields) {
    return AttentionSpec::from_json("{\"op\": \"" + op + "\", \"dtype\": \"" + dtype +
                                    "\", \"head_dim\": " + std::to_string(dim) + ", " + fields + "}");
  }
  // A forward and a decode, with sizes for each; every kernel is compiled once. AMX multiplies bf16.
  template <class Body>
  void for_each_kernel(const Body& body) {
    const bool amx = on().target().ends_with("amx"), narrow = on().target() == "x86-64-v3";
    const int dim = narrow || amx ? 64 : 128;
    constexpr Sizes forwards[] = {
        {}, {.batch = 1, .seqlen_q = 130, .seqlen_k = 90}, {.seqlen_q = 3, .seqlen_k = 200}};
    for (const Sizes& sizes : forwards) {
      body("forward", amx ? "bf16" : "fp32", dim, sizes);
      if (HasFatalFailure()) return;
    }
    if (!amx)
      body("decode", narrow ? "bf16" : "fp32", dim, Sizes{.heads_q = 6, .seqlen_q = 3, .seqlen_k = 333});
  }
};

TEST_P(FormulaKernels, MasksGiveTheBitsOfBuiltInOnes) {
  for_each_kernel([&](const std::string& op, const std::string& dtype, int dim, const Sizes& sizes) {
    for (const auto& [built_in, formula] : {std::pair{"[\"causal\"]", "[\"key <= position\"]"},
                                            {"[\"causal\"]", "[\"seqlen_k + row >= key + seqlen_q\"]"},
                                            {"[]", "[\"key >= 0\"]"}}) {
      Attention a(sizes, spec_of(op, dtype, dim, std::string("\"mask\": ") + built_in)),
          b(sizes, spec_of(op, dtype, dim, std::string("\"mask\": ") + formula));
      a.run(on().engine(), {});
      b.run(on().engine(), {});
      ASSERT_EQ(std::memcmp(a.o().data(), b.o().data(), a.o().size() * sizeof(float)), 0) << formula;
      ASSERT_EQ(std::memcmp(a.lse().data(), b.lse().data(), a.lse().size() * sizeof(float)), 0) << formula;
    }
  });
}

TEST_P(FormulaKernels, MasksOfTablesAndHeads) {
  for_each_kernel([&](const std::string& op, const std::string& dtype, int dim, const Sizes& sizes) {
    std::vector<int> document(static_cast<std::size_t>(sizes.batch * sizes.seqlen_k));
    for (int i = 0; i < sizes.batch * sizes.seqlen_k; ++i)
      document[static_cast<std::size_t>(i)] = i % sizes.seqlen_k / 37;
    const int shift = sizes.seqlen_k - sizes.seqlen_q;
    Attention a(sizes, spec_of(op, dtype, dim,
                               R"json("mask": ["key <= position", "document[key] == document[position]",
                                  "position - key < 20 * (head + 1)"],
                                  "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})json"));
    a.run(on().engine(), {{"document", table(document, DType::int32, {sizes.batch, sizes.seqlen_k})}});
    a.expect([&](int batch, int head, int row, int key, double s) {
      const int position = row + shift;
      const auto of = [&](int i) {
        const int clamped = std::min(std::max(i, 0), sizes.seqlen_k - 1);
        return document[static_cast<std::size_t>(batch * sizes.seqlen_k + clamped)];
      };
      return key <= position && of(key) == of(position) && position - key < 20 * (head + 1) ? s : none;
    });
  });
}

TEST_P(FormulaKernels, ScoresAndSinks) {
  for_each_kernel([&](const std::string& op, const std::string& dtype, int dim, const Sizes& sizes) {
    std::vector<float> slope, sinks;
    for (int h = 0; h < sizes.heads_q; ++h) {
      slope.push_back(std::exp2(-2.0f * static_cast<float>(h + 1)));
      sinks.push_back(static_cast<float>(h) * 2 - 1);
    }
    const int shift = sizes.seqlen_k - sizes.seqlen_q;
    Attention a(sizes, spec_of(op, dtype, dim,
                               R"json("mask": ["causal"], "sink_logits": true,
                                  "score": ["score + slope[head] * (key - position)", "cap * tanh(score / cap)"],
                                  "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}},
                                  "scalars": {"cap": "fp32"})json"));
    a.run(on().engine(), {{"slope", table(slope, DType::fp32, {sizes.heads_q})}, {"cap", 1.5}}, sinks);
    a.expect(
        [&](int, int head, int row, int key, double s) {
          const int position = row + shift;
          s += double{slope[static_cast<std::size_t>(head)]} * (key - position);
          return key <= position ? 1.5 * std::tanh(s / 1.5) : none;
        },
        sinks);
  });
}

TEST_P(FormulaKernels, FunctionsAndBiases) {
  for_each_kernel([&](const std::string& op, const std::string& dtype, int dim, const Sizes& sizes) {
    std::vector<float> bias(static_cast<std::size_t>(sizes.heads_q * 32));
    for (std::size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i % 13) / 8 - 0.7f;
    const int shift = sizes.seqlen_k - sizes.seqlen_q;
    Attention a(sizes, spec_of(op, dtype, dim,
                               R"json("score": ["score + bias[head, min(abs(key - position), 31)]",
                                  "key % 3 == row / 2 % 3 ? score - exp(score / 8) : max(score, -0.5) * sqrt(1.0 + key / 64)",
                                  "score + log(1.5 + abs(score)) * (head_kv + 1) / 4 + floor(key * 0.25) % 2"],
                                  "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", "buckets"]}})json"));
    a.run(on().engine(), {{"bias", table(bias, DType::fp32, {sizes.heads_q, 32})}});
    a.expect([&](int, int head, int row, int key, double s) {
      const int position = row + shift, group = sizes.heads_q / sizes.heads_kv;
      s += bias[static_cast<std::size_t>(head * 32 + std::min(std::abs(key - position), 31))];
      s = key % 3 == row / 2 % 3 ? s - std::exp(s / 8) : std::max(s, -0.5) * std::sqrt(1.0 + key / 64);
      return s + std::log(1.5 + std::abs(s)) * (head / group + 1) / 4 + key / 4 % 2;
    });
  });
}

FLASHJIT_ON_EVERY_DEVICE(FormulaKernels);

}  // namespace
}  // namespace flashjit::testing_support
