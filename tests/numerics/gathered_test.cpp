// Launches with gathered keys: a launch whose keys lie in two pairs of tensors is one whose keys lie in one.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit::testing_support {
namespace {

Tensor keys_of(Tensor t, std::int64_t begin, std::int64_t end) {
  t.data =
      static_cast<std::byte*>(t.data) + begin * t.strides[1] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[1] = end - begin;
  return t;
}
AttentionSpec spec_of(const std::string& fields) {
  return AttentionSpec::from_json("{\"op\": \"forward\", " + fields + "}");
}

class Gathered : public ComputesOnEveryDevice {
 protected:
  // `fields` without masks. `early_rows` and `late_keys` are formulas' numbers for the oracle.
  void expect(const std::string& fields, Case c, int gathered, int early_rows, int late_keys,
              const char* mask = "\"causal\"") {
    AttentionSpec split = spec_of(fields + R"(, "gathered": true, "mask": [)" + mask + "]");
    if (!why_unsupported(split, Target::parse(on().target())).empty() || !takes_next(split)) return;
    c.spec = spec_of(fields + R"(, "mask": [)" + mask + (*mask ? ", " : "") + "\"row >= " +
                     std::to_string(early_rows) + " || key >= " + std::to_string(late_keys) + "\"]");
    SCOPED_TRACE(c.str() + ", gathered " + std::to_string(gathered));
    Workload workload(on(), c);
    workload.reset();
    AttentionArgs args = workload.args();
    const Tensor k = *args.k, v = *args.v;
    args.k_gathered = keys_of(k, 0, gathered), args.v_gathered = keys_of(v, 0, gathered);
    args.k = keys_of(k, gathered, c.seqlen_k), args.v = keys_of(v, gathered, c.seqlen_k);
    if (early_rows > 0) args.early_rows = early_rows, args.late_keys = late_keys;
    const Kernel& kernel = on().engine().get(split, c.shape());
    kernel.launch(args);
    EXPECT_TRUE(workload.check());
  }
};

constexpr char plain[] = R"("dtype": "bf16", "head_dim": 64)";

// Gathered keys that end with blocks and that do not, none, and no others.
TEST_P(Gathered, AnyDivision) {
  std::uint64_t seed = 1;
  for (const int gathered : {256, 128, 77, 1, 0, 300, 263})
    expect(plain, {.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 300, .seed = seed++},
           gathered, 0, 0);
}

// Rows of a rank's first chunk see fewer of them than those of its second one.
TEST_P(Gathered, EarlyRows) {
  std::uint64_t seed = 20;
  for (const auto& [gathered, early, late] :
       {std::tuple{256, 128, 128}, {256, 128, 256}, {200, 75, 99}, {200, 150, 200}, {130, 1, 1}})
    for (const char* const mask : {"\"causal\"", ""})
      expect(plain,
             {.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 400, .seed = seed++},
             gathered, early, late, mask);
}

TEST_P(Gathered, DtypesAndHeads) {
  std::uint64_t seed = 50;
  for (const char* const fields :
       {R"("dtype": "fp16", "head_dim": 128, "head_dim_v": 72)", R"("dtype": "bf16", "head_dim": 256)",
        R"("dtype": "fp32", "head_dim": 40)", R"("dtype": "bf16", "head_dim": 64, "o_dtype": "fp32")",
        R"("dtype": "bf16", "head_dim": 320)"})
    expect(fields,
           {.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 140, .seqlen_k = 330, .seed = seed++}, 190,
           70, 50);
}

// Few rows, whose keys are divided among blocks of the grid, or read in place.
TEST_P(Gathered, FewRows) {
  std::uint64_t seed = 80;
  for (const int rows : {1, 6, 33})
    expect(plain,
           {.batch = 1, .heads_q = 4, .heads_kv = 1, .seqlen_q = rows, .seqlen_k = 1500, .seed = seed++}, 777,
           rows / 2, 300);
}

TEST_P(Gathered, Refusals) {
  for (const char* const field :
       {R"("varlen": true)", R"("paged": true)", R"("offsets": true)", R"("dropout": true)",
        R"("score": ["softcap"])", R"("sink_logits": true)", R"("batch_invariant": true)",
        R"("mask": ["sliding_window"])", R"("mask": [{"kind": "causal", "align": "top_left"}])"})
    expect_error(ErrorCode::unsupported, {"gathered"},
                 [&] { spec_of(std::string(plain) + ", \"gathered\": true, " + field); });
  if (on().is_cuda()) return;
  const AttentionSpec split = spec_of(std::string(plain) + R"(, "gathered": true)");
  Case c{.batch = 1, .heads_q = 1, .heads_kv = 1, .seqlen_q = 8, .seqlen_k = 16};
  c.spec = spec_of(plain);
  Workload workload(on(), c);
  workload.reset();
  AttentionArgs args = workload.args();
  const Tensor k = *args.k, v = *args.v;
  args.k = args.k_gathered = keys_of(k, 0, 8), args.v = args.v_gathered = keys_of(v, 8, 16);
  const auto refused = [&](std::initializer_list<const char*> parts, auto change) {
    AttentionArgs changed = args;
    change(changed);
    expect_error(ErrorCode::invalid_argument, parts,
                 [&] { on().engine().get(split, c.shape()).launch(changed); });
  };
  refused({"k_gathered"}, [](AttentionArgs& a) { a.k_gathered.reset(); });
  refused({"v_gathered", "7"}, [&](AttentionArgs& a) { a.v_gathered = keys_of(v, 0, 7); });
  refused({"early_rows", "9", "8"}, [](AttentionArgs& a) { a.early_rows = 9; });
  refused({"late_keys", "-1"}, [](AttentionArgs& a) { a.late_keys = -1; });
  std::int32_t words[4] = {1, 1, 7, 1};
  const auto with_words = [&](std::int64_t count) {
    return [&, count](AttentionArgs& a) { a.arrived = Tensor::contiguous(words, DType::int32, {}, {count}); };
  };
  AttentionArgs there = args;
  with_words(4)(there);
  EXPECT_NO_THROW(on().engine().get(split, c.shape()).launch(there));
  refused({"arrived", "3", "8"}, with_words(3));
  words[2] = 0;
  refused({"arrived[2]", "CPU"}, with_words(4));
}

FLASHJIT_ON_EVERY_DEVICE(Gathered);

}  // namespace
}  // namespace flashjit::testing_support
