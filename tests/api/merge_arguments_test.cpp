// merge() through both interfaces: its results, and bad input refused with the argument's name.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "runtime/flashjit.h"
#include "runtime/flashjit.hpp"
#include "tests/unit/expect_error.h"

namespace flashjit {
namespace {

constexpr int parts = 3, batch = 2, seqlen = 5, heads = 4, head_dim = 16;
constexpr float no_keys = -std::numeric_limits<float>::infinity();

Engine& merging_engine() {
  static Engine instance{EngineOptions{}};
  return instance;
}

// Part i of every row is 1 + i with a weight of 2^i. The second part is empty, and its o is NaN.
struct GoodParts {
  std::vector<float> parts_o, parts_lse, o, lse;
  AttentionArgs args;

  GoodParts()
      : parts_o(parts * batch * seqlen * heads * head_dim),
        parts_lse(parts * batch * heads * seqlen),
        o(parts_o.size() / parts, NAN),
        lse(parts_lse.size() / parts, NAN) {
    for (std::size_t i = 0; i < parts_o.size(); ++i) {
      const std::size_t part = i / o.size();
      parts_o[i] = part == 1 ? NAN : 1 + static_cast<float>(part);
    }
    for (std::size_t i = 0; i < parts_lse.size(); ++i) {
      const auto part = static_cast<float>(i / lse.size());
      parts_lse[i] = part == 1 ? no_keys : part * std::log(2.0f);
    }
    const auto tensor = [](std::vector<float>& data, std::initializer_list<std::int64_t> sizes) {
      return Tensor::contiguous(data.data(), DType::fp32, {}, sizes);
    };
    args.parts_o = tensor(parts_o, {parts, batch, seqlen, heads, head_dim});
    args.parts_lse = tensor(parts_lse, {parts, batch, heads, seqlen});
    args.o = tensor(o, {batch, seqlen, heads, head_dim});
    args.lse = tensor(lse, {batch, heads, seqlen});
  }

  void expect_merged(bool with_lse = true) const {
    for (const float value : o) ASSERT_NEAR(value, (1 * 1 + 3 * 4) / 5.0, 1e-5);
    for (const float value : lse) {
      if (with_lse)
        ASSERT_NEAR(value, std::log(5.0), 1e-5);
      else
        ASSERT_TRUE(std::isnan(value));
    }
  }
};

void expect_no_merge(std::initializer_list<const char*> texts,
                     const std::function<void(AttentionArgs&)>& spoil) {
  GoodParts good;
  AttentionArgs bad = good.args;
  spoil(bad);
  expect_error(ErrorCode::invalid_argument, texts, [&] { merge(merging_engine(), bad); });
  merge(merging_engine(), good.args);
  good.expect_merged();
}

TEST(MergeArguments, EmptyPartsCountAsNothing) {
  GoodParts given;
  merge(merging_engine(), given.args);
  given.expect_merged();
}

TEST(MergeArguments, WithoutLse) {
  GoodParts given;
  given.args.lse.reset();
  merge(merging_engine(), given.args);
  given.expect_merged(false);
}

TEST(MergeArguments, NoPartsMakeAnEmptyResult) {
  GoodParts given;
  given.args.parts_o->shape[0] = given.args.parts_lse->shape[0] = 0;
  merge(merging_engine(), given.args);
  for (const float value : given.o) ASSERT_EQ(value, 0);
  for (const float value : given.lse) ASSERT_EQ(value, no_keys);
}

TEST(MergeArguments, AMergeOfMergesIsAMerge) {
  GoodParts given, again;
  merge(merging_engine(), given.args);
  std::copy(given.o.begin(), given.o.end(), again.parts_o.begin());
  std::copy(given.lse.begin(), given.lse.end(), again.parts_lse.begin());
  again.args.parts_o->shape[0] = again.args.parts_lse->shape[0] = 1;
  merge(merging_engine(), again.args);
  again.expect_merged();
}

TEST(MergeArguments, ByALaunchOfItsSpec) {
  GoodParts given;
  const AttentionSpec spec = AttentionSpec::from_json(R"({"op": "merge", "dtype": "fp32", "head_dim": 16})");
  const Kernel& kernel = merging_engine().get(
      spec, {.batch = batch, .seqlen_q = seqlen, .num_heads_q = heads, .num_heads_kv = heads});
  kernel.launch(given.args);
  given.expect_merged();
  const auto refused = [&](std::initializer_list<const char*> texts, const auto& spoil) {
    AttentionArgs bad = given.args;
    spoil(bad);
    expect_error(ErrorCode::invalid_argument, texts, [&] { kernel.launch(bad); });
  };
  refused({"q was given", "\"op\": \"merge\""}, [](AttentionArgs& a) { a.q = a.o; });
  refused({"o has shape", "dimension 3 must be 16", "the spec's head_dim_v"},
          [](AttentionArgs& a) { a.o->shape[3] = a.parts_o->shape[4] = 8; });
  refused({"o has shape", "at most 1073741824 rows"}, [](AttentionArgs& a) {
    a.o->shape[1] = a.parts_o->shape[2] = a.parts_lse->shape[3] = a.lse->shape[2] = longest_sequence + 1;
  });
}

TEST(MergeArguments, Missing) {
  expect_no_merge({"o is missing: merging writes it"}, [](AttentionArgs& a) { a.o.reset(); });
  expect_no_merge({"parts_o is missing", "[parts, batch, seqlen, heads, head_dim]"},
                  [](AttentionArgs& a) { a.parts_o.reset(); });
  expect_no_merge({"parts_lse is missing"}, [](AttentionArgs& a) { a.parts_lse.reset(); });
}

TEST(MergeArguments, SizesThatDiffer) {
  expect_no_merge({"parts_o has shape", "dimension 2 must be 4", "as o"},
                  [](AttentionArgs& a) { a.o->shape[1] = seqlen - 1; });
  expect_no_merge({"parts_lse has shape", "dimension 0 must be 3", "the parts of parts_o"},
                  [](AttentionArgs& a) { a.parts_lse->shape[0] = 2; });
  expect_no_merge({"parts_lse has shape", "dimension 1 must be 2", "o's batch"},
                  [](AttentionArgs& a) { a.parts_lse->shape[1] = 1; });
  expect_no_merge({"lse has shape", "dimension 0 must be 2", "o's batch"},
                  [](AttentionArgs& a) { a.lse->shape[0] = 1; });
  expect_no_merge({"parts_lse has shape", "dimension 3 must be 5", "o's rows"},
                  [](AttentionArgs& a) { a.parts_lse->shape[3] = 4; });
  for (const std::int64_t rows : {std::int64_t{-1}, std::int64_t{longest_sequence} + 1})
    expect_no_merge({"o has shape", "between 0 and 1073741824"},
                    [&](AttentionArgs& a) { a.o->shape[1] = rows; });
  expect_no_merge({"parts_lse has shape", "dimension 2 must be 4", "o's heads"},
                  [](AttentionArgs& a) { a.parts_lse->shape[2] = 3; });
  expect_no_merge({"lse has shape", "dimension 2 must be 5", "o's rows"},
                  [](AttentionArgs& a) { a.lse->shape[2] = 4; });
  expect_no_merge({"o has rank 2"}, [](AttentionArgs& a) { a.o->rank = 2; });
  expect_no_merge({"parts_o has rank 4"}, [](AttentionArgs& a) { a.parts_o->rank = 4; });
}

TEST(MergeArguments, DTypes) {
  expect_no_merge({"parts_lse has dtype bf16", "fp32"},
                  [](AttentionArgs& a) { a.parts_lse->dtype = DType::bf16; });
  GoodParts given;
  given.args.parts_o->dtype = DType::bf16;
  expect_error(ErrorCode::invalid_spec, {"parts_dtype bf16 is neither fp32 nor the dtype, fp32"},
               [&] { merge(merging_engine(), given.args); });
}

TEST(MergeArguments, MemoryThatIsWrittenTwiceOrRead) {
  expect_no_merge({"o is written", "overwrite each other"}, [](AttentionArgs& a) { a.o->strides[1] = 0; });
  expect_no_merge({"o", "parts_o"}, [](AttentionArgs& a) { a.o->data = a.parts_o->data; });
  expect_no_merge({"lse is written", "overwrite each other"},
                  [](AttentionArgs& a) { a.lse->strides[1] = seqlen - 1; });
  expect_no_merge({"o's last dimension has stride 2"}, [](AttentionArgs& a) { a.o->strides[3] = 2; });
  expect_no_merge({"parts_o's last dimension has stride 2"},
                  [](AttentionArgs& a) { a.parts_o->strides[4] = 2; });
}

TEST(MergeArguments, MisalignedPointers) {
  for (const auto& [name, member] : {std::pair{"parts_o", &AttentionArgs::parts_o},
                                     {"parts_lse", &AttentionArgs::parts_lse},
                                     {"o", &AttentionArgs::o},
                                     {"lse", &AttentionArgs::lse}}) {
    const std::string text = std::string(name) + "'s data pointer is not aligned to 4 bytes";
    expect_no_merge({text.c_str()},
                    [&](AttentionArgs& a) { (a.*member)->data = static_cast<char*>((a.*member)->data) + 2; });
  }
}

TEST(MergeArguments, TheCInterface) {
  GoodParts given;
  const auto tensor_of = [](const Tensor& t) {
    flashjit_tensor c{};
    c.data = t.data;
    c.dtype = FLASHJIT_FP32;
    c.device_kind = FLASHJIT_CPU;
    c.rank = t.rank;
    std::copy(t.shape.begin(), t.shape.end(), c.shape);
    std::copy(t.strides.begin(), t.strides.end(), c.strides);
    return c;
  };
  const std::array tensors = {tensor_of(*given.args.parts_o), tensor_of(*given.args.parts_lse),
                              tensor_of(*given.args.o), tensor_of(*given.args.lse)};
  const flashjit_argument args[] = {{FLASHJIT_ARG_PARTS_O, {.tensor = &tensors[0]}},
                                    {FLASHJIT_ARG_PARTS_LSE, {.tensor = &tensors[1]}},
                                    {FLASHJIT_ARG_O, {.tensor = &tensors[2]}},
                                    {FLASHJIT_ARG_LSE, {.tensor = &tensors[3]}}};
  flashjit_engine* c_engine = nullptr;
  ASSERT_EQ(flashjit_engine_create(nullptr, &c_engine), FLASHJIT_OK);
  EXPECT_EQ(flashjit_merge(c_engine, args, 4, nullptr), FLASHJIT_OK) << flashjit_last_error_message();
  given.expect_merged();
  EXPECT_EQ(flashjit_merge(c_engine, args, 2, nullptr), FLASHJIT_INVALID_ARGUMENT);
  EXPECT_EQ(flashjit_merge(nullptr, args, 4, nullptr), FLASHJIT_INVALID_ARGUMENT);
  flashjit_engine_destroy(c_engine);
}

}  // namespace
}  // namespace flashjit
