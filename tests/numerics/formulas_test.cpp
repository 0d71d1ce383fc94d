// Known variants of attention as formulas, and random formulas, against the float64 oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "codegen/spec/spec.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/random_formulas.hpp"

namespace flashjit::testing_support {
namespace {

struct Variant {
  const char *name, *source;
  const char* fields;  // of the spec, as JSON
  int rows = 70, keys = 150;
};

constexpr Variant variants[] = {
    {"ALiBi", "Press, Smith, Lewis: Train Short, Test Long, ICLR 2022",
     R"_("mask": ["causal"], "score": ["alibi"])_"},
    {"ALiBi as in its paper", "the same",
     R"_("mask": ["causal"], "score": ["score + slope[head] * (key - position)"],
        "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}})_"},
    {"softcap", "Gemma 2, 2024", R"_("mask": ["causal"], "score": ["softcap"])_"},
    {"softcap of 30, precise", "Grok-1, xai-org/grok-1, 2024",
     R"_("score": ["30 * tanh(score / 30)"], "precise": true)_"},
    {"additive bias", "pairs of residues: AlphaFold 2, 2021; attn_mask of PyTorch's SDPA",
     R"_("score": ["bias"])_"},
    {"relative bias by distance", "after T5: Raffel et al., JMLR 2020",
     R"_("score": ["score + bias[head, min(abs(key - position), 127)]"],
        "tables": {"bias": {"dtype": "bf16", "shape": ["heads_q", 128]}})_"},
    {"relative bias by buckets", "T5: Raffel et al., JMLR 2020",
     R"_("score": ["score + bias[bucket[min(max(position - key, 0), 127)], head]"],
        "tables": {"bias": {"dtype": "fp16", "shape": ["count", "heads_q"]},
                   "bucket": {"dtype": "uint8", "shape": [128]}})_"},
    {"relative bias in windows of 7 x 7", "Swin: Liu et al., ICCV 2021",
     R"_("score": ["score + bias[head, (row / 7 - key / 7 + 6) * 13 + row % 7 - key % 7 + 6]"],
        "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", 169]}})_",
     49, 49},
    {"shifted windows", "Swin: Liu et al., ICCV 2021",
     R"_("score": ["region[row] == region[key] ? score : score - 100"],
        "tables": {"region": {"dtype": "int8", "shape": ["seqlen_k"]}})_",
     49, 49},
    {"prefix-LM", "T5: Raffel et al., JMLR 2020; UniLM: Dong et al., 2019", R"_("mask": ["prefix_lm"])_"},
    {"documents", "packing of sequences: Krell et al., 2021",
     R"_("mask": ["causal", "document[key] == document[position]"],
        "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})_"},
    {"dilated", "Longformer: Beltagy et al., 2020",
     R"_("mask": ["(position - key) % 3 == 0 && abs(position - key) <= 96"])_"},
    {"strided", "Sparse Transformers: Child et al., 2019, figure 3b",
     R"_("mask": ["key <= position && (position - key < 16 || (position - key) % 16 == 0)"])_"},
    {"fixed", "Sparse Transformers: Child et al., 2019, figure 3c",
     R"_("mask": ["key <= position && (key / 16 == position / 16 || key % 16 >= 14)"])_"},
    {"neighbourhood of 5 x 7, dilated by 1 x 2", "NATTEN: Hassani et al., CVPR 2023; Hassani and Shi, 2022",
     R"_("mask": [{"kind": "neighbourhood", "shape": [9, 16], "window": [5, 7], "dilation": [1, 2]}])_", 144,
     144},
    {"sinks and a window", "StreamingLLM: Xiao et al., ICLR 2024",
     R"_("mask": ["key <= position && (key < 4 || position - key < 64)"])_"},
    {"sink logits and a window", "gpt-oss, OpenAI, 2025",
     R"_("mask": ["causal", "position - key < 128"], "sink_logits": true)_"},
    {"causal with look-ahead", "streaming speech: Zhang et al., Transformer Transducer, 2020",
     R"_("mask": ["key <= position + ahead"], "scalars": {"ahead": "int32"})_"},
    {"chunks", "Llama 4, Meta, 2025", R"_("mask": ["key <= position && key / 64 == position / 64"])_"},
    {"causal by blocks", "frames of videos: Yin et al., CausVid, 2025",
     R"_("mask": ["key / 24 <= position / 24"])_"},
    {"window, global and random blocks", "BigBird: Zaheer et al., NeurIPS 2020",
     R"_("mask": ["key < 16 || position < 16 || abs(position - key) < 24 || blocks[position / 16, key / 16] != 0"],
        "tables": {"blocks": {"dtype": "uint8", "shape": ["blocks_m", "blocks_n"]}})_"},
    {"window and global tokens", "Longformer: Beltagy et al., 2020",
     R"_("mask": ["is_global[key] != 0 || is_global[position] != 0 || abs(position - key) <= 16"],
        "tables": {"is_global": {"dtype": "uint8", "shape": ["batch", "seqlen_k"]}})_"},
    {"images see all of themselves", "Gemma 3, 2025",
     R"_("mask": ["key <= position || image[key] != 0 && image[key] == image[position]"],
        "tables": {"image": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})_"},
    {"logarithmic distance", "KERPLE: Chi et al., NeurIPS 2022",
     R"_("score": ["score - abs(p[head]) * log(1 + abs(a[head]) * abs(position - key))"],
        "tables": {"p": {"dtype": "fp32", "shape": ["heads_q"]}, "a": {"dtype": "fp32", "shape": ["heads_q"]}})_"},
    {"scaling by length", "log-length scaling: Chiang and Cholak, ACL 2022",
     R"_("mask": ["causal"], "score": ["score * max(1.0, log(position + 1) / 4)"])_"},
    {"forget gates", "Forgetting Transformer: Lin et al., ICLR 2025",
     R"_("mask": ["causal"], "score": ["score + gates[batch, head, position] - gates[batch, head, key]"],
        "tables": {"gates": {"dtype": "fp32", "shape": ["batch", "heads_q", "seqlen_k"]}})_"},
    {"each key/value head its own window", "mixed windows: Xiao et al., DuoAttention, 2024",
     R"_("mask": ["key <= position && position - key < reach[head_kv]"],
        "tables": {"reach": {"dtype": "int32", "shape": ["heads_kv"]}})_"},
    {"entries of different reach", "windows given at run time",
     R"_("mask": ["abs(position - key) < reach[batch] * factor"], "scalars": {"factor": "fp32"},
        "tables": {"reach": {"dtype": "int32", "shape": ["batch"]}})_"},
};
static_assert(std::size(variants) >= 20);

AttentionSpec spec_of(const std::string& fields, DType dtype, const std::string& op = "forward") {
  return AttentionSpec::from_json(R"({"op": ")" + op + R"(", "dtype": ")" + to_string(dtype) +
                                  R"(", "head_dim": 64, )" + fields + "}");
}

class Formulas : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
  // The variant in its own size, and in that of `other`, whose seed both draw from.
  void expect_variant(const Variant& variant, const AttentionSpec& spec, Case other) {
    Case c{.spec = spec,
           .batch = 2,
           .heads_q = 4,
           .heads_kv = 2,
           .seqlen_q = variant.rows,
           .seqlen_k = variant.keys};
    c.seed = other.seed++;
    expect(c);
    other.spec = spec;
    other.batch = 1;
    other.heads_kv = 2;
    if (variant.rows == variant.keys) other.seqlen_q = variant.rows, other.seqlen_k = variant.keys;
    other.layout = MemoryLayout::padded;
    expect(other);
  }
  // The dtype's turn; each target has all of them in turns.
  DType next_dtype() {
    const std::vector<DType> dtypes = on().dtypes();
    const std::size_t turn = turn_++;
    return dtypes[(turn + turn / dtypes.size()) % dtypes.size()];
  }

 private:
  std::size_t turn_ = 0;
};

TEST_P(Formulas, KnownVariants) {
  std::uint64_t seed = 0;
  for (const Variant& variant : variants) {
    SCOPED_TRACE(std::string(variant.name) + " (" + variant.source + ")");
    const AttentionSpec spec = spec_of(variant.fields, next_dtype());
    seed += 2;
    if (!takes_next(spec, 2)) continue;
    expect_variant(variant, spec, {.heads_q = 6, .seqlen_q = 333, .seqlen_k = 270, .seed = seed});
  }
}

bool is_real(DType dtype) {
  return dtype == DType::fp32 || dtype == DType::bf16 || dtype == DType::fp16;
}

// A variant's tables of reals get gradients.
AttentionSpec training_spec(const Variant& variant, DType dtype) {
  AttentionSpec spec = spec_of(variant.fields, dtype, "backward");
  for (DeclaredTable& table : spec.tables) table.grad = is_real(table.dtype);
  return spec.validated();
}

TEST_P(Formulas, KnownVariantsTrain) {
  std::uint64_t seed = 100;
  for (const Variant& variant : variants) {
    SCOPED_TRACE(std::string(variant.name) + " (" + variant.source + ")");
    const AttentionSpec spec = training_spec(variant, next_dtype());
    seed += 2;
    if (!takes_next(spec, 2)) continue;
    expect_variant(variant, spec, {.heads_q = 2, .seqlen_q = 190, .seqlen_k = 170, .seed = seed});
  }
}

// Formulas that keep intervals and others in one mask, beside what else a launch has: packed and paged
// sequences, lengths, dropout, heads that share tiles, parts of keys that are merged.
TEST_P(Formulas, WithOtherFeatures) {
  constexpr char scores[] =
      R"_("score": ["alibi", "softcap"], "sink_logits": true, "mask": ["position - key < 900 || key < 7")_";
  const auto forward = [&](const std::string& fields, Case c) {
    c.spec = spec_of(fields, next_dtype());
    c.heads_q = 6, c.heads_kv = 2;
    if (takes_next(c.spec)) expect(c);
  };
  const std::vector<int> rows = {0, 5, 300, 1, 64, 65, 0}, keys = {7, 5, 260, 130, 0, 64, 0};
  forward(std::string(scores) + R"_(, "causal"], "varlen": true)_",
          {.lengths_q = rows, .lengths_k = keys, .spare_rows = 130, .seed = 1});
  forward(R"_("varlen": true, "mask": ["key <= position", "document[key] == document[position]"],
              "score": ["score + gain[head, row] - loss[key]"],
              "tables": {"document": {"dtype": "uint8", "shape": ["total_k"]},
                         "gain": {"dtype": "fp16", "shape": ["heads_q", "total_q"]},
                         "loss": {"dtype": "bf16", "shape": ["total_k"]}})_",
          {.lengths_q = rows, .lengths_k = keys, .spare_rows = 9, .seed = 2});
  forward(std::string(scores) + R"_(, "padding"], "dropout": true, "lse": false)_",
          {.batch = 3, .seqlen_q = 130, .seqlen_k = 200, .dropout_p = 0.3, .seed = 3});
  forward(std::string(scores) + R"_(], "varlen": true, "paged": true)_", {.seqlen_k = 300,
                                                                          .lengths_q = {3, 0, 150, 17},
                                                                          .lengths_k = {300, 40, 150, 0},
                                                                          .page_size = 16,
                                                                          .seed = 4});
  forward(std::string(scores) + R"_(, {"kind": "block_sparse", "block_m": 64, "block_n": 64}])_",
          {.batch = 2, .seqlen_q = 200, .seqlen_k = 300, .seed = 5});
  // A row without keys, and a table without elements.
  forward(R"_("mask": ["key > position + 20"], "sink_logits": true)_",
          {.batch = 2, .seqlen_q = 64, .seqlen_k = 64, .seed = 6});
  forward(R"_("score": ["bias"])_", {.batch = 2, .seqlen_q = 40, .seqlen_k = 0, .seed = 7});

  const auto decode = [&](const std::string& fields, Case c) {
    c.spec = spec_of(fields, next_dtype(), "decode");
    c.heads_q = 8, c.heads_kv = 2;
    if (takes_next(c.spec)) expect(c);
  };
  decode(std::string(scores) + "]", {.batch = 3, .seqlen_q = 1, .seqlen_k = 3000, .seed = 8});
  decode(std::string(scores) + R"_(, "tree"], "paged": true, "varlen": true)_",
         {.seqlen_k = 2100,
          .lengths_q = {1, 4, 0, 9},
          .lengths_k = {2100, 700, 33, 9},
          .page_size = 64,
          .seed = 9});
  decode(
      R"_("mask": ["prefix_lm", "key % 7 != position % 5"], "batch_invariant": true,
             "score": ["score + bias[head_kv, min(position - key, 255)]"],
             "tables": {"bias": {"dtype": "fp32", "shape": ["heads_kv", 256]}})_",
      {.batch = 2, .seqlen_q = 3, .seqlen_k = 1500, .lengths_k = {1500, 800}, .seed = 10});
}

// Rows that padding leaves unused have an lse of -inf, whatever the sinks, and give a sink no gradient,
// whatever they hold. Each kernel has its own end of a row.
TEST_P(Formulas, SinksOfUnusedRows) {
  constexpr char fields[] = R"_("sink_logits": true, "mask": ["padding"])_";
  constexpr char packed[] = R"_("sink_logits": true, "varlen": true, "mask": ["padding", "causal"])_";
  for (const char* op : {"forward", "backward"})
    for (const DType dtype : own_dtypes()) {
      for (const std::uint64_t seed : {1u, 2u})
        expect({.spec = spec_of(fields, dtype, op),
                .batch = 3,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 70,
                .seqlen_k = 50,
                .seed = seed});
      expect({.spec = spec_of(packed, dtype, op),
              .heads_q = 4,
              .heads_kv = 2,
              .lengths_q = {70, 0, 33, 64},
              .lengths_k = {50, 20, 33, 0},
              .spare_rows = 40,
              .seed = 3});
    }
}

// Gradients beside what else a backward has: packed sequences, lengths, dropout, groups, block lists, equal
// bits run after run; and where weights are 0: scores of -inf, NaN scores of dropped keys, rows and keys
// without others.
TEST_P(Formulas, TrainingWithOtherFeatures) {
  const auto train = [&](const std::string& fields, Case c) {
    c.spec = spec_of(fields, next_dtype(), "backward");
    c.heads_q = 6, c.heads_kv = 2;
    if (takes_next(c.spec)) expect(c);
  };
  constexpr char capped[] =
      R"_("score": ["score * (1 + gain[head_kv] / 8) + loss[key % 5, row]", "softcap"], "sink_logits": true, "mask": ["position - key < 90 || key < 7")_";
  constexpr char tables[] = R"_("tables": {"gain": {"dtype": "fp16", "shape": ["heads_kv"], "grad": true},
      "loss": {"dtype": "bf16", "shape": [5, "seqlen_q or 1"], "grad": true}})_";
  const std::vector<int> rows = {0, 5, 130, 1, 64, 65, 0}, keys = {7, 5, 100, 130, 0, 64, 0};
  train(std::string(capped) + R"_(, "causal"], "varlen": true, "dropout": true, )_" + tables,
        {.lengths_q = rows, .lengths_k = keys, .spare_rows = 130, .dropout_p = 0.3, .seed = 1});
  train(R"_("varlen": true, "mask": ["key <= position", "document[key] == document[position]"],
            "score": ["score + gain[head, row] - loss[key]"],
            "tables": {"document": {"dtype": "uint8", "shape": ["total_k"]},
                       "gain": {"dtype": "fp16", "shape": ["heads_q", "total_q"], "grad": true},
                       "loss": {"dtype": "bf16", "shape": ["total_k"], "grad": true}})_",
        {.lengths_q = rows, .lengths_k = keys, .spare_rows = 9, .seed = 2});
  train(std::string(capped) +
            R"_(, "padding"], "dropout": true, "deterministic": true, "grad_dtype": "fp32", )_" + tables,
        {.batch = 3, .seqlen_q = 130, .seqlen_k = 100, .layout = MemoryLayout::padded, .seed = 3});
  train(std::string(capped) + R"_(, {"kind": "block_sparse", "block_m": 64, "block_n": 64}], )_" + tables,
        {.batch = 2, .seqlen_q = 100, .seqlen_k = 150, .seed = 4});
  // NaN for dropped keys, -inf for a row's own.
  train(R"_("mask": ["causal"], "score": ["score + abs(slope[head]) * log(position - key)"],
            "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}})_",
        {.batch = 2, .seqlen_q = 70, .seqlen_k = 90, .seed = 5});
  train(R"_("mask": ["key > position + 20"], "sink_logits": true)_",
        {.batch = 2, .seqlen_q = 64, .seqlen_k = 64, .seed = 6});
  // Zeros, whatever the outputs held before.
  constexpr char bias[] = R"_("score": ["score + bias[head, 0]"], "sink_logits": true,
      "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", "n"], "grad": true}})_";
  train(bias, {.batch = 0, .seqlen_q = 40, .seqlen_k = 40, .seed = 7});
  train(bias, {.batch = 2, .seqlen_q = 0, .seqlen_k = 40, .seed = 8});
  train(bias, {.batch = 2, .seqlen_q = 40, .seqlen_k = 0, .seed = 9});
}

// Formulas that are not finite at the scores of rows and keys that do not exist, which are 0.
TEST_P(Formulas, TrainingOfWhatIsNotFiniteAtZero) {
  for (const char* score : {"score + slope[head] / score", "slope[head] + log(abs(score))",
                            "score * slope[head] + sqrt(abs(score) - 1e-30)"})
    for (const char* others : {R"_("mask": ["causal"])_", R"_("dropout": true, "mask": ["key % 5 != 2"])_"}) {
      Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 21, .seqlen_k = 75, .data = Data::plain};
      c.spec =
          spec_of(std::string(R"_("tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}},
                                      "score": [")_") +
                      score + "\"], " + others,
                  next_dtype(), "backward");
      expect(c);
    }
}

// Where a pair has no weight, a derivative that is not finite reaches nothing. Where there is no derivative,
// the one that formulas.md names counts: 0 of sqrt at 0, that of the first of two equal operands, that of the
// other operand of NaN. Elements of a table are told apart.
TEST_P(Formulas, TrainingWhereDerivativesAreSpecial) {
  const auto table_of = [](const char* name, const std::vector<float>& values) {
    verify::NamedTable table{.name = name,
                             .dtype = DType::fp32,
                             .shape = {static_cast<std::int64_t>(values.size())},
                             .elements = {}};
    table.elements.resize(values.size() * sizeof(float));
    std::memcpy(table.elements.data(), values.data(), table.elements.size());
    return table;
  };
  const std::string
      tables = R"_("mask": ["causal"], "tables": {"t": {"dtype": "fp32", "shape": [2], "grad": true})_",
      both = tables + R"_(, "u": {"dtype": "fp32", "shape": [2], "grad": true}}, )_";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::string fields;
    std::vector<float> t, u;
  } cases[] = {
      {tables + R"_(}, "score": ["score * log(position - key + 1) * t[head]"])_", {0.5f, 1}, {}},
      {tables +
           R"_(}, "score": ["score + t[head] * log(position - key + 1) + t[key % 2] * log(position - key + 1)"])_",
       {0.5f, 1},
       {}},
      {tables + R"_(}, "score": ["score + sqrt(t[0]) + key % 3 * sqrt(t[1])"])_", {0, 4}, {}},
      {tables + R"_(}, "score": ["score * t[0] + key % 3 * t[1]"])_", {0.5f, 1}, {}},
      {both + R"_("score": ["score + key % 3 * min(t[head], u[head])"])_", {1, 2}, {1, 1.5f}},
      {both + R"_("score": ["score + key % 3 * max(t[head], u[head])"])_", {1, 2}, {1, 2.5f}},
      {both + R"_("score": ["score + key % 3 * (min(t[head], u[head]) + max(t[head], u[head]))"])_",
       {nan, 2},
       {1, nan}},
  };
  for (const auto& [fields, t, u] : cases) {
    Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 37, .seqlen_k = 37, .data = Data::plain};
    c.spec = spec_of(fields, next_dtype(), "backward");
    c.named.tables.push_back(table_of("t", t));
    if (!u.empty()) c.named.tables.push_back(table_of("u", u));
    SCOPED_TRACE(fields);
    Workload workload(on(), c);
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.check());
    for (const NamedArgument& named : workload.host_args().named) {
      if (!named.name.starts_with("d_")) continue;
      const Tensor& gradient = std::get<Tensor>(named.value);
      for (int i = 0; i < 2; ++i)
        EXPECT_TRUE(
            std::isfinite(verify::load_element(gradient.data, gradient.dtype, i * gradient.strides[0])));
    }
  }
}

// Sums of infinities are infinite, those of both signs NaN, with the same bits always.
TEST_P(Formulas, GradientsOfTablesThatAreNotFinite) {
  if (on().is_cuda()) GTEST_SKIP() << "exact sums of CPUs";
  for (const int rows : {1, 40}) {
    Case c{.seqlen_q = rows, .seqlen_k = 2, .data = Data::plain};
    // The derivative by the element is infinite at key 0 alone.
    c.spec = spec_of(R"_("score": ["score + (key == 0 ? 3e38 * (t[row % 2] * (16 + key) - (16 + key)) : 0)"],
                         "tables": {"t": {"dtype": "fp32", "shape": [2], "grad": true}})_",
                     DType::fp32, "backward");
    verify::NamedTable ones{.name = "t", .dtype = DType::fp32, .shape = {2}, .elements = {}};
    constexpr float of_both[] = {1, 1};
    ones.elements.resize(sizeof of_both);
    std::memcpy(ones.elements.data(), of_both, sizeof of_both);
    c.named.tables.push_back(ones);
    Workload workload(on(), c);
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.fetch());
    for (const NamedArgument& named : workload.host_args().named) {
      if (named.name != "d_t") continue;
      const Tensor& gradient = std::get<Tensor>(named.value);
      const auto* const bits = static_cast<const std::uint32_t*>(gradient.data);
      if (rows == 1)
        EXPECT_TRUE(std::isinf(static_cast<const float*>(gradient.data)[0]));
      else
        for (int i = 0; i < 2; ++i) EXPECT_EQ(bits[i * gradient.strides[0]], 0x7fffffffu);
    }
  }
}

TEST_P(Formulas, GradientsHaveEqualBitsRunAfterRun) {
  const AttentionSpec spec = spec_of(
      R"_("deterministic": true, "score": ["score + bias[min(abs(key - position), 40), head] * slope[head_kv]"],
          "sink_logits": true, "tables": {"bias": {"dtype": "fp32", "shape": [41, "heads_q"], "grad": true},
                                          "slope": {"dtype": "fp32", "shape": ["heads_kv"], "grad": true}})_",
      DType::bf16, "backward");
  Workload workload(
      on(), {.spec = spec, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 300, .seqlen_k = 280});
  const Kernel& kernel = workload.kernel(on().engine());
  std::vector<std::byte> first;
  for (int run = 0; run < 10; ++run) {
    workload.reset();
    kernel.launch(workload.args());
    if (run == 0) first = workload.outputs();
    EXPECT_EQ(workload.outputs(), first);
  }
  EXPECT_TRUE(workload.check());
}

// The same for backwards of random formulas.
TEST_P(Formulas, RandomTraining) {
  const bool many = test_all() || on().is_cuda();
  const std::uint64_t seed = sample_seed();
  verify::Draw draw(seed + 77 + (many ? 0 : std::hash<std::string>{}(on().target()) % 1000));
  int cases = 0, told = 0;
  for (int i = 0; i < (many ? 30 : 3); ++i) {
    AttentionSpec spec{.op = Operation::backward, .dtype = next_dtype(), .head_dim = 64};
    spec.varlen = draw.chance(0.3);
    spec.dropout = draw.chance(0.3);
    spec.sink_logits = draw.chance(0.4);
    spec.precise = draw.chance(0.3);
    spec.deterministic = draw.chance(0.3);
    verify::declare_names(spec);
    if (draw.chance(0.5)) spec.mask.emplace_back(CausalMask{});
    const int scores = draw.between(1, 2);
    for (int j = 0; j < scores; ++j)
      spec.score.push_back(verify::random_formula(draw, FormulaUse::score, spec));
    if (draw.chance(0.4))
      spec.mask.emplace_back(FormulaMask{verify::random_formula(draw, FormulaUse::mask, spec)});
    verify::drop_unread_names(spec);
    for (DeclaredTable& table : spec.tables)
      table.grad =
          is_real(table.dtype) && std::any_of(spec.score.begin(), spec.score.end(), [&](const auto& score) {
            return score.find(table.name + "[") != std::string::npos;
          });
    try {
      spec = spec.validated();
    } catch (const Error& error) {  // derivatives of a long formula
      EXPECT_NE(error.message().find("1024 operations"), std::string::npos) << error.message();
      continue;
    }
    Case c{.spec = spec,
           .batch = 2,
           .heads_q = 4,
           .heads_kv = 2,
           .seqlen_q = draw.between(1, 100),
           .seqlen_k = draw.between(1, 150),
           .data = Data::plain,
           .seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30))};
    if (spec.varlen) {
      c.lengths_q = {c.seqlen_q, draw.between(0, c.seqlen_q)};
      c.lengths_k = {c.seqlen_k, draw.between(0, c.seqlen_k)};
    }
    SCOPED_TRACE(c.str());
    try {
      Workload workload(on(), c);
      workload.reset();
      workload.kernel(on().engine()).launch(workload.args());
      ASSERT_TRUE(workload.fetch());
      const verify::Report report = workload.report();
      EXPECT_EQ(report.wrong, 0) << report.str();
      ++cases;
      told += report.undecided * 2 <= report.rows * 3 * spec.head_dim;
    } catch (const Prebuilt&) {
    } catch (const Error& error) {
      ADD_FAILURE() << error.message() << "\n" << error.detail();
    }
  }
  std::cout << "  " << told << " of " << cases << " can be told" << std::endl;
  EXPECT_GE(told * 3, cases);
}

// Formulas that nobody would write. A few of their results cannot be told: where a difference in the last bit
// decides a comparison, or beyond float32.
TEST_P(Formulas, Random) {
  const bool many = test_all() || on().is_cuda();
  const std::uint64_t seed = sample_seed();
  verify::Draw draw(seed + (many ? 0 : std::hash<std::string>{}(on().target()) % 1000));
  int cases = 0, told = 0;
  for (int i = 0; i < (many ? 40 : 4); ++i) {
    AttentionSpec spec{.op = draw.chance(0.3) ? Operation::decode : Operation::forward,
                       .dtype = next_dtype(),
                       .head_dim = 64};
    spec.varlen = draw.chance(0.3);
    spec.paged = draw.chance(0.3);
    spec.dropout = spec.op == Operation::forward && draw.chance(0.2);
    spec.sink_logits = draw.chance(0.4);
    spec.precise = draw.chance(0.3);
    verify::declare_names(spec);
    if (draw.chance(0.3)) spec.mask.emplace_back(CausalMask{});
    if (draw.chance(0.2)) spec.mask.emplace_back(SlidingWindowMask{});
    const int scores = draw.between(0, 2), masks = draw.between(scores == 0, 2);
    for (int j = 0; j < scores; ++j)
      spec.score.push_back(verify::random_formula(draw, FormulaUse::score, spec));
    for (int j = 0; j < masks; ++j)
      spec.mask.emplace_back(FormulaMask{verify::random_formula(draw, FormulaUse::mask, spec)});
    verify::drop_unread_names(spec);
    try {
      spec = spec.validated();
    } catch (const Error& error) {  // long formulas
      EXPECT_NE(error.message().find("1024 operations"), std::string::npos) << error.message();
      continue;
    }
    for (int j = 0; j < 2; ++j) {
      const int most_rows = spec.op == Operation::decode ? 20 : 150;
      Case c{.spec = spec,
             .batch = 2,
             .heads_q = j ? 6 : 4,
             .heads_kv = 2,
             .seqlen_q = draw.between(1, most_rows),
             .seqlen_k = draw.between(1, 300),
             .page_size = spec.paged ? 16 : 0,
             .layout = j ? MemoryLayout::padded : MemoryLayout::contiguous,
             .data = Data::plain,
             .seed = static_cast<std::uint64_t>(draw.between(1, 1 << 30))};
      if (spec.varlen) c.lengths_q = {c.seqlen_q, draw.between(0, c.seqlen_q)};
      if (spec.varlen || spec.paged) c.lengths_k = {c.seqlen_k, draw.between(0, c.seqlen_k)};
      SCOPED_TRACE(c.str());
      try {
        Workload workload(on(), c);
        workload.kernel(on().engine()).launch(workload.args());
        ASSERT_TRUE(workload.fetch());
        const verify::Report report = workload.report();
        EXPECT_EQ(report.wrong, 0) << report.str();
        ++cases;
        told += report.undecided * 2 <= report.rows * spec.head_dim;
      } catch (const Prebuilt&) {
      } catch (const Error& error) {
        ADD_FAILURE() << error.message() << "\n" << error.detail();
      }
    }
  }
  std::cout << "  " << told << " of " << cases << " can be told" << std::endl;
  EXPECT_GE(told * 2, cases);
}

// A mask as a formula gives the same bits as the built-in one: it skips the same blocks, and tests no others.
TEST_P(Formulas, MasksGiveTheBitsOfBuiltInOnes) {
  if (on().is_cuda()) GTEST_SKIP() << "configs may differ";
  const auto outputs = [&](const char* op, const std::vector<Mask>& mask, const Case& sizes) {
    Case c = sizes;
    c.spec.op = op == std::string("decode") ? Operation::decode : Operation::forward;
    c.spec.dtype = DType::bf16;
    c.spec.head_dim = 64;
    c.spec.mask = mask;
    c.spec = c.spec.validated();
    Workload workload(on(), c);
    workload.reset();
    workload.kernel(on().engine()).launch(workload.args());
    EXPECT_TRUE(workload.fetch());
    std::string bytes;
    for (const auto& [tensor, size] :
         {std::pair{*workload.host_args().o, 2 * 64}, {*workload.host_args().lse, 4}})
      bytes.append(static_cast<const char*>(tensor.data),
                   static_cast<std::size_t>(size * c.batch * c.heads_q * c.seqlen_q));
    return bytes;
  };
  for (const auto& [built_in, formula] :
       {std::pair{std::vector<Mask>{CausalMask{}}, "key <= position"}, {std::vector<Mask>{}, "key >= 0"}}) {
    for (const auto& [rows, keys] : {std::pair{70, 150}, {130, 90}, {3, 200}}) {
      const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = rows, .seqlen_k = keys};
      EXPECT_EQ(outputs("forward", built_in, c), outputs("forward", {FormulaMask{formula}}, c)) << formula;
    }
    const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 3, .seqlen_k = 333};
    EXPECT_EQ(outputs("decode", built_in, c), outputs("decode", {FormulaMask{formula}}, c)) << formula;
  }
}

FLASHJIT_ON_EVERY_DEVICE(Formulas);

}  // namespace
}  // namespace flashjit::testing_support
