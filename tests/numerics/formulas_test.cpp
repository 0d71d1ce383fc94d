// Known variants of attention as formulas, and random formulas, against the float64 oracle.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "codegen/spec.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/random_formulas.hpp"

namespace flashjit::testing_support {
namespace {

struct Variant {
  const char *name, *source;
  const char* fields;  // of the spec, as JSON
  int rows = 70, keys = 150;
};

constexpr Variant variants[] = {
    {"ALiBi", "Press, Smith, Lewis: Train Short, Test Long, ICLR 2022", R"("mask": ["causal"], "score": ["alibi"])"},
    {"ALiBi as in its paper", "the same",
     R"("mask": ["causal"], "score": ["score + slope[head] * (key - position)"],
        "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}})"},
    {"softcap", "Gemma 2, 2024", R"("mask": ["causal"], "score": ["softcap"])"},
    {"softcap of 30, precise", "Grok-1, xai-org/grok-1, 2024", R"("score": ["30 * tanh(score / 30)"], "precise": true)"},
    {"additive bias", "pairs of residues: AlphaFold 2, 2021; attn_mask of PyTorch's SDPA", R"("score": ["bias"])"},
    {"relative bias by distance", "after T5: Raffel et al., JMLR 2020",
     R"("score": ["score + bias[head, min(abs(key - position), 127)]"],
        "tables": {"bias": {"dtype": "bf16", "shape": ["heads_q", 128]}})"},
    {"relative bias by buckets", "T5: Raffel et al., JMLR 2020",
     R"("score": ["score + bias[bucket[min(max(position - key, 0), 127)], head]"],
        "tables": {"bias": {"dtype": "fp16", "shape": ["count", "heads_q"]},
                   "bucket": {"dtype": "uint8", "shape": [128]}})"},
    {"relative bias in windows of 7 x 7", "Swin: Liu et al., ICCV 2021",
     R"("score": ["score + bias[head, (row / 7 - key / 7 + 6) * 13 + row % 7 - key % 7 + 6]"],
        "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", 169]}})",
     49, 49},
    {"shifted windows", "Swin: Liu et al., ICCV 2021",
     R"("score": ["region[row] == region[key] ? score : score - 100"],
        "tables": {"region": {"dtype": "int8", "shape": ["seqlen_k"]}})",
     49, 49},
    {"prefix-LM", "T5: Raffel et al., JMLR 2020; UniLM: Dong et al., 2019", R"("mask": ["prefix_lm"])"},
    {"documents", "packing of sequences: Krell et al., 2021",
     R"("mask": ["causal", "document[key] == document[position]"],
        "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})"},
    {"dilated", "Longformer: Beltagy et al., 2020",
     R"("mask": ["(position - key) % 3 == 0 && abs(position - key) <= 96"])"},
    {"strided", "Sparse Transformers: Child et al., 2019, figure 3b",
     R"("mask": ["key <= position && (position - key < 16 || (position - key) % 16 == 0)"])"},
    {"fixed", "Sparse Transformers: Child et al., 2019, figure 3c",
     R"("mask": ["key <= position && (key / 16 == position / 16 || key % 16 >= 14)"])"},
    {"neighbourhood of 5 x 7, dilated by 1 x 2", "NATTEN: Hassani et al., CVPR 2023; Hassani and Shi, 2022",
     R"("mask": [{"kind": "neighbourhood", "shape": [9, 16], "window": [5, 7], "dilation": [1, 2]}])", 144, 144},
    {"sinks and a window", "StreamingLLM: Xiao et al., ICLR 2024",
     R"("mask": ["key <= position && (key < 4 || position - key < 64)"])"},
    {"sink logits and a window", "gpt-oss, OpenAI, 2025", R"("mask": ["causal", "position - key < 128"], "sink_logits": true)"},
    {"causal with look-ahead", "streaming speech: Zhang et al., Transformer Transducer, 2020",
     R"("mask": ["key <= position + ahead"], "scalars": {"ahead": "int32"})"},
    {"chunks", "Llama 4, Meta, 2025", R"("mask": ["key <= position && key / 64 == position / 64"])"},
    {"causal by blocks", "frames of videos: Yin et al., CausVid, 2025", R"("mask": ["key / 24 <= position / 24"])"},
    {"window, global and random blocks", "BigBird: Zaheer et al., NeurIPS 2020",
     R"("mask": ["key < 16 || position < 16 || abs(position - key) < 24 || blocks[position / 16, key / 16] != 0"],
        "tables": {"blocks": {"dtype": "uint8", "shape": ["blocks_m", "blocks_n"]}})"},
    {"window and global tokens", "Longformer: Beltagy et al., 2020",
     R"("mask": ["is_global[key] != 0 || is_global[position] != 0 || abs(position - key) <= 16"],
        "tables": {"is_global": {"dtype": "uint8", "shape": ["batch", "seqlen_k"]}})"},
    {"images see all of themselves", "Gemma 3, 2025",
     R"("mask": ["key <= position || image[key] != 0 && image[key] == image[position]"],
        "tables": {"image": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})"},
    {"logarithmic distance", "KERPLE: Chi et al., NeurIPS 2022",
     R"("score": ["score - abs(p[head]) * log(1 + abs(a[head]) * abs(position - key))"],
        "tables": {"p": {"dtype": "fp32", "shape": ["heads_q"]}, "a": {"dtype": "fp32", "shape": ["heads_q"]}})"},
    {"scaling by length", "log-length scaling: Chiang and Cholak, ACL 2022",
     R"("mask": ["causal"], "score": ["score * max(1.0, log(position + 1) / 4)"])"},
    {"forget gates", "Forgetting Transformer: Lin et al., ICLR 2025",
     R"("mask": ["causal"], "score": ["score + gates[batch, head, position] - gates[batch, head, key]"],
        "tables": {"gates": {"dtype": "fp32", "shape": ["batch", "heads_q", "seqlen_k"]}})"},
    {"each key/value head its own window", "mixed windows: Xiao et al., DuoAttention, 2024",
     R"("mask": ["key <= position && position - key < reach[head_kv]"],
        "tables": {"reach": {"dtype": "int32", "shape": ["heads_kv"]}})"},
    {"entries of different reach", "windows given at run time",
     R"("mask": ["abs(position - key) < reach[batch] * factor"], "scalars": {"factor": "fp32"},
        "tables": {"reach": {"dtype": "int32", "shape": ["batch"]}})"},
};
static_assert(std::size(variants) >= 20);

AttentionSpec spec_of(const std::string& fields, DType dtype, const std::string& op = "forward") {
  return AttentionSpec::from_json(R"({"op": ")" + op + R"(", "dtype": ")" + to_string(dtype) +
                                  R"(", "head_dim": 64, )" + fields + "}");
}

class Formulas : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
  // The dtype's turn.
  DType next_dtype() {
    const std::vector<DType> dtypes = on().dtypes();
    return dtypes[turn_++ % dtypes.size()];
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
    if (!takes_next(spec)) continue;
    expect({.spec = spec,
            .batch = 2,
            .heads_q = 4,
            .heads_kv = 2,
            .seqlen_q = variant.rows,
            .seqlen_k = variant.keys,
            .seed = seed});
    const bool square = variant.rows == variant.keys;
    expect({.spec = spec,
            .batch = 1,
            .heads_q = 6,
            .heads_kv = 2,
            .seqlen_q = square ? variant.rows : 333,
            .seqlen_k = square ? variant.keys : 270,
            .layout = MemoryLayout::padded,
            .seed = seed + 1});
  }
}

FLASHJIT_ON_EVERY_DEVICE(Formulas);

}  // namespace
}  // namespace flashjit::testing_support
