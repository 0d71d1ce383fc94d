// Launches with offsets: a shard of rows and keys is what the whole computes of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tests/unit/expect_error.h"
#include "tools/verify/forward_bound.hpp"

namespace flashjit::testing_support {
namespace {

class Shards : public ComputesOnEveryDevice {
 protected:
  void expect(const std::string& json, Case c) {
    SCOPED_TRACE(json);
    c.spec = AttentionSpec::from_json(json);
    if (!why_unsupported(c.spec, Target::parse(on().target())).empty() || !takes_next(c.spec)) return;
    EXPECT_TRUE(computes(on(), c));
  }
};

constexpr char of_heads[] = R"("dtype": "bf16", "head_dim": 64, "offsets": true)";

std::string spec(const char* op, const std::string& fields) {
  return std::string("{\"op\": \"") + op + "\", " + of_heads + ", " + fields + "}";
}

// Random offsets, and lists, trees and lengths of the whole.
TEST_P(Shards, EveryMask) {
  std::uint64_t seed = 1;
  for (const char* const masks :
       {R"(["causal"])", R"([{"kind": "causal", "align": "top_left"}, "padding"])", R"(["sliding_window"])",
        R"([{"kind": "sliding_window", "sinks": true}, "causal"])", R"(["tree"])",
        R"([{"kind": "block_sparse", "block_m": 80, "block_n": 48, "per_head": true}])",
        R"([{"kind": "block_sparse", "block_m": 64, "block_n": 128}, "causal"])",
        R"(["position - key < 90 && key <= position + 7"])", R"(["(key + row + head) % 5 != 0", "causal"])"})
    for (const char* const op : {"forward", "backward"})
      expect(spec(op, std::string("\"mask\": ") + masks),
             {.batch = 3, .heads_q = 4, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 200, .seed = seed++});
}

TEST_P(Shards, DropoutDropsTheWeightsOfTheWhole) {
  std::uint64_t seed = 100;
  for (const char* const fields :
       {R"("dropout": true)", R"("dropout": true, "mask": ["causal"], "varlen": true)"})
    for (const char* const op : {"forward", "backward"}) {
      Case c{.batch = 3, .heads_q = 4, .heads_kv = 1, .seqlen_q = 90, .seqlen_k = 150, .seed = seed++};
      if (std::strstr(fields, "varlen")) c.lengths_q = {90, 20, 1}, c.lengths_k = {33, 150, 70};
      expect(spec(op, fields), c);
    }
}

TEST_P(Shards, FormulasCountInTheWhole) {
  std::uint64_t seed = 200;
  for (const char* const fields :
       {R"_("score": ["alibi"])_",
        R"_("score": ["score + slope[head] * (key - position)"], "mask": ["causal"],
           "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}})_",
        R"_("score": ["bias"])_",
        R"_("score": ["score * (1 + gain[row % 7] / 8)", "softcap"], "deterministic": true,
           "tables": {"gain": {"dtype": "fp32", "shape": [7], "grad": true}})_",
        R"_("mask": ["document[key] == document[position]", "causal"],
           "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})_"})
    for (const char* const op : {"forward", "backward"})
      expect(spec(op, fields),
             {.batch = 2, .heads_q = 2, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 130, .seed = seed++});
}

TEST_P(Shards, FewRowsOverCaches) {
  std::uint64_t seed = 300;
  for (const char* const op : {"decode", "forward"})
    for (const char* const fields : {R"("mask": ["causal"], "paged": true)",
                                     R"("mask": [{"kind": "sliding_window", "sinks": true}], "paged": true)",
                                     R"("mask": ["tree"], "score": ["alibi"], "paged": true)"})
      for (const int rows : {1, 6})
        expect(spec(op, fields), {.batch = 5,
                                  .heads_q = 8,
                                  .heads_kv = 2,
                                  .seqlen_q = rows,
                                  .seqlen_k = 300,
                                  .page_size = 16,
                                  .seed = seed++});
}

// The chunks of a whole, computed one by one and merged, against the oracle of the whole.
TEST_P(Shards, ChunksMergeIntoTheWhole) {
  for (const char* const fields :
       {R"("mask": ["causal"], "dropout": true)", R"("score": ["alibi"], "mask": ["sliding_window"])"}) {
    SCOPED_TRACE(fields);
    const AttentionSpec whole = AttentionSpec::from_json(
        R"({"op": "forward", "dtype": "bf16", "head_dim": 64, )" + std::string(fields) + "}");
    Case c{.spec = whole, .batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 210, .seqlen_k = 210};
    c.masks = verify::MaskDataOptions{.window_left = 60, .window_right = 3};
    Workload workload(on(), c);
    workload.reset();
    AttentionSpec shard = whole;
    shard.offsets = true;
    shard.o_dtype = DType::fp32;
    constexpr int bounds_q[] = {0, 63, 128, 210}, bounds_k[] = {0, 50, 161, 210};
    constexpr int parts = 3;
    const auto fp32 = [&](std::vector<std::int64_t> sizes) {
      const Tensor like = Tensor::contiguous(nullptr, DType::fp32, {}, sizes);
      return std::make_unique<GuardedTensor>(on(), DType::fp32,
                                             TensorShape{like.rank, like.shape, like.strides}, Poison::nan,
                                             GuardedTensor::Fence::after);
    };
    const auto number = [&](std::int64_t value) {
      auto tensor = std::make_unique<GuardedTensor>(
          on(), DType::int64, TensorShape{.rank = 1, .shape = {c.batch}, .strides = {0}}, Poison::nan,
          GuardedTensor::Fence::after);
      *static_cast<std::int64_t*>(tensor->on_host().data) = value;
      tensor->upload();
      return tensor;
    };
    const auto rows_of = [](Tensor t, int dim, int begin, int end) {
      t.data = static_cast<std::byte*>(t.data) +
               begin * t.strides[static_cast<std::size_t>(dim)] * static_cast<std::int64_t>(size_of(t.dtype));
      t.shape[static_cast<std::size_t>(dim)] = end - begin;
      return t;
    };
    const AttentionArgs& args = workload.args();
    auto parts_o = fp32({parts, c.batch, c.seqlen_q, c.heads_q, 64}),
         parts_lse = fp32({parts, c.batch, c.heads_q, c.seqlen_q});
    parts_o->upload(), parts_lse->upload();
    std::vector<std::unique_ptr<GuardedTensor>> offsets;
    for (int i = 0; i < 3; ++i)
      for (int j = 0; j < parts; ++j) {
        const auto part_of = [&](Tensor t) {
          t.data = static_cast<float*>(t.data) + j * t.strides[0];
          Tensor one = t;
          one.rank = t.rank - 1;
          std::copy(t.shape.begin() + 1, t.shape.end(), one.shape.begin());
          std::copy(t.strides.begin() + 1, t.strides.end(), one.strides.begin());
          return one;
        };
        AttentionArgs own = args;
        own.q = rows_of(*args.q, 1, bounds_q[i], bounds_q[i + 1]);
        own.k = rows_of(*args.k, 1, bounds_k[j], bounds_k[j + 1]);
        own.v = rows_of(*args.v, 1, bounds_k[j], bounds_k[j + 1]);
        own.o = rows_of(part_of(parts_o->on_device()), 1, bounds_q[i], bounds_q[i + 1]);
        own.lse = rows_of(part_of(parts_lse->on_device()), 2, bounds_q[i], bounds_q[i + 1]);
        own.row_offset = offsets.emplace_back(number(bounds_q[i]))->on_device();
        own.key_offset = offsets.emplace_back(number(bounds_k[j]))->on_device();
        own.workspace.reset();
        const Kernel& kernel = on().engine().get(shard, {.batch = c.batch,
                                                         .seqlen_q = bounds_q[i + 1] - bounds_q[i],
                                                         .seqlen_k = bounds_k[j + 1] - bounds_k[j],
                                                         .num_heads_q = c.heads_q,
                                                         .num_heads_kv = c.heads_kv});
        kernel.launch(own);
      }
    merge(
        on().engine(),
        {.o = args.o, .lse = args.lse, .parts_o = parts_o->on_device(), .parts_lse = parts_lse->on_device()});
    on().synchronize();
    EXPECT_TRUE(workload.check());
  }
}

FLASHJIT_ON_EVERY_DEVICE(Shards);

}  // namespace
}  // namespace flashjit::testing_support
