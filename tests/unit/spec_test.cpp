#include "codegen/spec/spec.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "codegen/base/strict_json.hpp"
#include "expect_error.h"

namespace flashjit {
namespace {

AttentionSpec parse(const std::string& text) {
  return AttentionSpec::from_json(text);
}

// A spec of the required fields and `more`.
std::string with(const std::string& more) {
  return R"({"op": "forward", "dtype": "bf16", "head_dim": 128)" + (more.empty() ? "" : ", " + more) + "}";
}

void expect_invalid(const std::string& text, std::initializer_list<const char*> parts) {
  SCOPED_TRACE(text.substr(0, 200));
  expect_error(ErrorCode::invalid_spec, parts, [&] { parse(text); });
}
void expect_unsupported(const std::string& text, std::initializer_list<const char*> parts) {
  SCOPED_TRACE(text);
  expect_error(ErrorCode::unsupported, parts, [&] { parse(text); });
}

TEST(Spec, Defaults) {
  const AttentionSpec spec = parse(with(""));
  EXPECT_EQ(spec.op, Operation::forward);
  EXPECT_EQ(spec.dtype, DType::bf16);
  EXPECT_EQ(spec.head_dim, 128);
  EXPECT_EQ(spec.head_dim_v, 128);
  EXPECT_TRUE(spec.mask.empty());
  EXPECT_TRUE(spec.lse);
  EXPECT_FALSE(spec.varlen || spec.dropout || spec.paged || spec.deterministic);
  EXPECT_TRUE(spec.config.empty());
}

TEST(Spec, EveryField) {
  const AttentionSpec spec = parse(
      R"({"op": "forward", "dtype": "fp16", "head_dim": 64, "head_dim_v": 96,
          "mask": [{"kind": "block_sparse", "block_m": 64, "block_n": 32, "per_head": true}, "causal",
                   {"kind": "sliding_window", "align": "bottom_right", "sinks": true}, "padding"],
          "dropout": false, "lse": false,
          "varlen": true, "paged": false, "deterministic": true,
          "config": {"block_m": 128, "block_n": 64, "num_stages": 2, "num_warps": 8}})");
  EXPECT_EQ(spec.dtype, DType::fp16);
  EXPECT_EQ(spec.head_dim, 64);
  EXPECT_EQ(spec.head_dim_v, 96);
  EXPECT_EQ(spec.mask, (std::vector<Mask>{
                           CausalMask{}, SlidingWindowMask{.align = CausalAlign::bottom_right, .sinks = true},
                           PaddingMask{}, BlockSparseMask{.block_m = 64, .block_n = 32, .per_head = true}}));
  EXPECT_FALSE(spec.lse);
  EXPECT_TRUE(spec.varlen);
  EXPECT_TRUE(spec.deterministic);
  EXPECT_EQ(spec.config, (PinnedConfig{.block_m = 128, .block_n = 64, .num_stages = 2, .num_warps = 8}));
}

// Fields at their default are in no text, so a field added later changes no key.
TEST(Spec, CanonicalText) {
  EXPECT_EQ(parse(with(R"("head_dim_v": 128, "mask": [], "dropout": false, "lse": true, "varlen": false,
                          "paged": false, "deterministic": false, "o_dtype": "bf16", "parts_dtype": "fp32",
                          "config": {})"))
                .to_json(),
            R"({"op": "forward", "dtype": "bf16", "head_dim": 128})");
  EXPECT_EQ(
      parse(R"({"config": {"num_warps": 4, "block_m": 64}, "lse": false, "head_dim_v": 32,
                      "varlen": true,
                      "mask": ["tree", {"kind": "causal"},
                               {"kind": "block_sparse", "block_n": 128}],
                      "dropout": true, "deterministic": true, "head_dim": 64, "dtype": "fp32", "op": "forward"})")
          .to_json(),
      R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "head_dim_v": 32, )"
      R"("mask": ["causal", "block_sparse", "tree"], "dropout": true, )"
      R"("lse": false, "varlen": true, "deterministic": true, "config": {"block_m": 64, "num_warps": 4}})");
}

TEST(Spec, EqualSpecsGiveEqualTextAndHash) {
  const char* same[] = {
      R"("mask": ["causal", {"kind": "block_sparse", "block_n": 64}])",
      R"("mask": [{"per_head": false, "block_n": 64, "kind": "block_sparse"}, {"kind": "causal", "align": "bottom_right"}])",
      R"("mask": ["causal", "causal", {"kind": "block_sparse", "block_n": 64, "block_m": 128}], "head_dim_v": 128, "lse": true)",
  };
  const AttentionSpec first = parse(with(same[0]));
  for (const char* more : same) {
    const AttentionSpec spec = parse(with(more));
    EXPECT_EQ(spec, first);
    EXPECT_EQ(spec.to_json(), first.to_json());
    EXPECT_EQ(spec.hash(), first.hash());
    EXPECT_EQ(parse(spec.to_json()), spec);
  }
}

TEST(Spec, DifferentSpecsGiveDifferentTextAndHash) {
  std::vector<AttentionSpec> specs;
  for (const char* more : {"",
                           R"("head_dim_v": 64)",
                           R"("mask": ["causal"])",
                           R"("mask": [{"kind": "causal", "align": "top_left"}])",
                           R"("mask": ["padding"])",
                           R"("mask": ["padding"], "varlen": true)",
                           R"("mask": ["sliding_window"])",
                           R"("mask": [{"kind": "sliding_window", "sinks": true}])",
                           R"("mask": ["tree"])",
                           R"("mask": ["tree", "padding"])",
                           R"("mask": ["block_sparse"])",
                           R"("mask": [{"kind": "block_sparse", "block_m": 64}])",
                           R"("mask": [{"kind": "block_sparse", "block_n": 64}])",
                           R"("mask": [{"kind": "block_sparse", "per_head": true}])",
                           R"("mask": ["causal", "block_sparse"])",
                           R"("mask": ["causal", {"kind": "block_sparse", "of_masks": true}])",
                           R"("lse": false)",
                           R"("varlen": true)",
                           R"("deterministic": true)",
                           R"("config": {"block_m": 64})",
                           R"("config": {"block_n": 64})",
                           R"("config": {"num_stages": 1})",
                           R"("config": {"num_warps": 4})",
                           R"("config": {"q_in_registers": false})",
                           R"("config": {"q_in_registers": true})",
                           R"("config": {"ping_pong": true})",
                           R"("config": {"tile_order": "heads"})",
                           R"("config": {"tile_order": "sections"})",
                           R"("config": {"pack_gqa": true})"}) {
    specs.push_back(parse(with(more)));
  }
  specs.push_back(parse(R"({"op": "forward", "dtype": "fp16", "head_dim": 128})"));
  specs.push_back(parse(R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "head_dim_v": 128})"));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_NE(specs[i], specs[j]);
      EXPECT_NE(specs[i].to_json(), specs[j].to_json());
      EXPECT_NE(specs[i].hash(), specs[j].hash());
    }
  }
}

// Specs built in C++ follow the same rules.
TEST(Spec, Validated) {
  const AttentionSpec spec{.head_dim = 64, .mask = {PaddingMask{}, CausalMask{}, CausalMask{}}};
  const AttentionSpec valid = spec.validated();
  EXPECT_EQ(valid.head_dim_v, 64);
  EXPECT_EQ(valid.mask.size(), 2u);
  EXPECT_EQ(valid.validated(), valid);
  EXPECT_EQ(valid.to_json(), spec.to_json());
  expect_error(ErrorCode::invalid_spec, {"head_dim 0", "8 would work"}, [] { AttentionSpec{}.validated(); });
  expect_error(ErrorCode::invalid_spec, {"dtype int32", "bf16"},
               [] { AttentionSpec{.dtype = DType::int32, .head_dim = 64}.validated(); });
}

TEST(Spec, MalformedJson) {
  expect_invalid("", {"not valid JSON", "line 1, column 1"});
  expect_invalid("{\"op\": \"forward\",\n \"dtype\": bf16}", {"not valid JSON", "line 2, column 11"});
  expect_invalid(with("") + "x", {"not valid JSON", "expected end of input"});
  expect_invalid(with("\"lse\": true,"), {"not valid JSON"});
  expect_invalid(with("\"lse\": nan"), {"not valid JSON"});
  expect_invalid(with("\"head_dim_v\": 1e999"), {"not valid JSON", "1e999"});
  expect_invalid("{\"op\": \"\xff\"}", {"not valid JSON", "UTF-8"});
  expect_invalid("{\"op\": \"" + std::string(100000, 'x'), {"not valid JSON"});
  expect_invalid(std::string(100000, '['), {"nests deeper than 64"});
  for (const char* text : {"[]", "null", "3", "\"forward\"", "true"})
    expect_invalid(text, {"must be an object"});
}

// Its size is looked at before anything of it is read: these are no JSON.
TEST(Spec, LongTextsAreRefusedUnread) {
  expect_invalid(std::string(262'145, '['), {"the spec has 262145 bytes; at most 262144 would work"});
  expect_invalid(std::string(262'144, '['), {"nests deeper"});
  EXPECT_EQ(parse(std::string(262'144 - with("").size(), ' ') + with("")), parse(with("")));
}

TEST(Spec, JsonIsReadAsTheLibraryReadsIt) {
  for (const char* text : {"{}", "[]", "null", "[1, -2, 2.5, 1e300, true, false, null, \"a\\u00e9\\n\"]",
                           R"({"a": {"b": [{}, [], {"c": [[1], 2]}]}, "d": "", "": 18446744073709551615})"})
    EXPECT_EQ(parse_strict_json(text, "it", ErrorCode::invalid_spec), nlohmann::json::parse(text));
}

// A reader that walks through a list after each of its members would not end in hours.
TEST(Spec, ReadingIsLinearInObjects) {
  std::string text = "[{}";
  constexpr std::size_t count = 200'000;
  for (std::size_t i = 1; i < count; ++i) text += ",{}";
  EXPECT_EQ(parse_strict_json(text + "]", "it", ErrorCode::invalid_spec).size(), count);
}

TEST(Spec, ListsAreCountedBeforeTheyAreRead) {
  const auto many = [](const std::string& entry) {
    std::string text;
    for (int i = 0; i < 5000; ++i) text += (i ? ", " : "") + entry;
    return text;
  };
  expect_invalid(with("\"mask\": [" + many("3") + "]"), {"mask has 5000 entries, at most 32"});
  expect_invalid(with("\"score\": [" + many("3") + "]"), {"score has 5000 entries, at most 8"});
  std::string names;
  for (int i = 0; i < 5000; ++i) names += (i ? ", \"t" : "\"t") + std::to_string(i) + "\": 3";
  expect_invalid(with("\"tables\": {" + names + "}"), {"tables has 5000 entries, at most 8"});
  expect_invalid(with("\"scalars\": {" + names + "}"), {"scalars has 5000 entries, at most 16"});
  // The C++ interface takes lists, too.
  AttentionSpec spec{.head_dim = 64};
  spec.mask.assign(33, CausalMask{});
  expect_error(ErrorCode::invalid_spec, {"mask has 33 entries"}, [&] { spec.validated(); });
  spec.mask.assign(32, CausalMask{});
  EXPECT_EQ(spec.validated().mask.size(), 1u);
}

TEST(Spec, Fields) {
  expect_invalid(with(R"("headdim": 64)"), {R"("headdim")", "did you mean head_dim?"});
  expect_invalid(with(R"("masks": [])"), {R"("masks")", "did you mean mask?"});
  expect_invalid(with(R"("config": {"blok_m": 64})"), {R"("config.blok_m")", "did you mean block_m?"});
  expect_invalid(with(R"("mask": [{"kind": "causal", "algn": "top_left"}])"),
                 {R"("mask[0].algn")", "did you mean align?"});
  expect_invalid(with(R"("qqqqqqqq": 1)"), {"qqqqqqqq", "the fields are op, dtype"});
  expect_invalid("{\"" + std::string(100000, 'x') + "\": 1}", {"unknown field"});
  expect_invalid(with(R"("lse": true, "lse": true)"), {"\"lse\"", "given twice"});
  expect_invalid(with(R"("config": {"block_m": 64, "block_m": 32})"), {"\"block_m\"", "given twice"});
  expect_invalid(R"({"dtype": "bf16", "head_dim": 64})", {"\"op\"", "missing"});
  expect_invalid(R"({"op": "forward", "head_dim": 64})", {"\"dtype\"", "missing", "bf16"});
  expect_invalid(R"({"op": "forward", "dtype": "bf16"})", {"\"head_dim\"", "missing"});
}

// Words of other interfaces are answered with what says the same here, not with what is spelt alike.
TEST(Spec, WordsOfOtherInterfaces) {
  expect_invalid(with(R"("causal": true)"), {R"(mask ["causal"] would work)"});
  expect_invalid(with(R"("is_causal": true)"), {R"(mask ["causal"] would work)"});
  expect_invalid(with(R"("window": 128)"), {R"(mask ["sliding_window"], with window_left)"});
  expect_invalid(with(R"("softcap": 30)"), {R"(score ["softcap"] would work)"});
  expect_invalid(with(R"("softmax_scale": 1)"), {"softmax_scale at a launch would work"});
  expect_invalid(with(R"("block_m": 64)"), {R"(config {"block_m": ...} would work)"});
  expect_invalid(with(R"("num_heads": 8)"), {"the shape that a kernel is asked for would work"});
  expect_invalid(with(R"("mask": [{"kind": "sliding_window", "window": 9}])"),
                 {"mask[0].window", "with window_left and window_right at a launch"});
  const std::pair<const char*, const char*> meant[] = {
      {"sliding", "sliding_window"}, {"window", "sliding_window"},
      {"local", "sliding_window"},   {"pad", "padding"},
      {"sparse", "block_sparse"},    {"causal_mask", "causal"},
      {"prefix", "prefix_lm"},       {"neighborhood", "neighbourhood"}};
  for (const auto& [word, mask] : meant)
    expect_invalid(with(R"("mask": [")" + std::string(word) + "\"]"),
                   {(std::string("did you mean ") + mask + "?").c_str()});
  expect_invalid(R"({"op": "forward", "dtype": "bfloat16", "head_dim": 64})", {"did you mean bf16?"});
  // Nothing is near: the list alone says what there is.
  for (const char* word : {"doc", "w", "zebra"}) {
    try {
      AttentionSpec::from_json(with(R"("mask": [")" + std::string(word) + "\"]"));
      ADD_FAILURE() << word;
    } catch (const Error& error) {
      EXPECT_THAT(error.message(), testing::Not(testing::HasSubstr("did you mean"))) << word;
    }
  }
}

// for_op leaves out what has no meaning for the operation, and nothing that would change a result.
TEST(Spec, OfAnotherOperation) {
  const auto as = [](const std::string& json, Operation op) {
    return AttentionSpec::from_json(json, op).to_json();
  };
  const std::string forward =
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "head_dim_v": 32, "mask": ["causal", "padding"], )"
      R"("dropout": true, "lse": false, "varlen": true, "o_dtype": "fp32", "score": ["score + slope[head]"], )"
      R"("tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}}, "sink_logits": true, )"
      R"("config": {"block_m": 64}})";
  const std::string start = R"(", "dtype": "bf16", "head_dim": 64, "head_dim_v": 32)",
                    scores = R"("score": ["score + slope[head]"], "tables": {"slope": {"dtype": "fp32", )"
                             R"("shape": ["heads_q"])";
  EXPECT_EQ(as(forward, Operation::backward),
            R"({"op": "backward)" + start +
                R"(, "mask": ["causal", "padding"], "dropout": true, "varlen": true, )"
                R"("o_dtype": "fp32", )" +
                scores + R"(, "grad": true}}, "sink_logits": true})");
  EXPECT_EQ(as(forward, Operation::decode),
            R"({"op": "decode)" + start +
                R"(, "mask": ["causal"], "lse": false, "varlen": true, "o_dtype": "fp32", )" + scores +
                R"(}}, "sink_logits": true})");
  EXPECT_EQ(as(forward, Operation::append_kv), R"({"op": "append_kv)" + start + R"(, "varlen": true})");
  EXPECT_EQ(as(forward, Operation::merge), R"({"op": "merge)" + start + R"(, "lse": false, "varlen": true})");
  EXPECT_EQ(as(forward, Operation::forward), AttentionSpec::from_json(forward).to_json()) << "keeps pins";

  const std::string decode =
      R"({"op": "decode", "dtype": "bf16", "head_dim": 64, "mask": ["causal"], "paged": true, "append": true, )"
      R"("batch_invariant": true, "kv_dtype": "int8", "kv_scale": "head", "rotary": {"style": "half", "q": true}})";
  EXPECT_EQ(as(decode, Operation::append_kv),
            R"({"op": "append_kv", "dtype": "bf16", "head_dim": 64, "paged": true, "kv_dtype": "int8", )"
            R"("kv_scale": "head", "rotary": {"style": "half", "q": true}})");
  // A promise about bits stays, and is refused where no kernel keeps it.
  EXPECT_THAT(as(decode, Operation::forward), testing::HasSubstr(R"("batch_invariant": true)"));
  // Gradients that no launch changes are the same run after run.
  EXPECT_THAT(as(decode, Operation::backward),
              testing::HasSubstr(R"("deterministic": true, "batch_invariant": true)"));
  expect_error(ErrorCode::unsupported, {"batch_invariant true is not supported by op merge"}, [&] {
    AttentionSpec::from_json(R"({"op": "merge", "dtype": "bf16", "head_dim": 64, "batch_invariant": true})");
  });
  const std::string cached = R"({"op": "decode", "dtype": "bf16", "head_dim": 64, "kv_dtype": "int8")";
  EXPECT_EQ(as(cached + "}", Operation::forward), R"({"op": "forward", "dtype": "bf16", "head_dim": 64})");
  EXPECT_EQ(as(cached + R"(, "paged": true})", Operation::forward),
            R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "paged": true, "kv_dtype": "int8"})");
  EXPECT_EQ(as(cached + R"(, "paged": true})", Operation::backward),
            R"({"op": "backward", "dtype": "bf16", "head_dim": 64})");
  // A mask that no decode has is no detail.
  expect_error(ErrorCode::unsupported, {"mask block_sparse is not supported by op decode"}, [&] {
    as(R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": ["block_sparse"]})", Operation::decode);
  });
  // Lists are made of masks alone, and read no table of scores.
  EXPECT_EQ(
      as(R"json({"op": "forward", "dtype": "bf16", "head_dim": 64,
               "mask": [{"kind": "block_sparse", "of_masks": true}, "doc[key] == doc[position]"],
               "score": ["score * doc_scale"], "dropout": true, "scalars": {"doc_scale": "fp32"},
               "tables": {"doc": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}})json",
         Operation::make_block_lists),
      R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 64, )"
      R"("mask": [{"kind": "block_sparse", "of_masks": true}, "doc[batch, key] == doc[batch, position]"], )"
      R"("tables": {"doc": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}}})");
  expect_error(ErrorCode::invalid_spec, {"op \"decoed\"", "did you mean decode?"},
               [] { operation_named("decoed"); });
}

TEST(Spec, Types) {
  expect_invalid(with(R"("lse": 1)"), {"lse 1", "true or false"});
  expect_invalid(with(R"("lse": null)"), {"lse null", "true or false"});
  expect_invalid(with(R"("head_dim_v": "64")"), {"head_dim_v \"64\"", "integer"});
  expect_invalid(with(R"("head_dim_v": 64.5)"), {"head_dim_v 64.5", "integer"});
  expect_invalid(with(R"("mask": "causal")"), {"mask \"causal\"", "list", "[\"causal\"]"});
  expect_invalid(with(R"("mask": [3])"), {"mask[0] 3", "name of a mask"});
  expect_invalid(with(R"("mask": [[]])"), {"mask[0] a list", "name of a mask"});
  expect_invalid(with(R"("mask": [{}])"), {"mask[0]", "\"kind\""});
  expect_invalid(with(R"("mask": [{"kind": 1}])"), {"mask[0] 1"});
  expect_invalid(with(R"("config": [])"), {"config a list", "object"});
  expect_invalid(with(R"("config": null)"), {"config null", "object"});
  expect_invalid(R"({"op": 1, "dtype": "bf16", "head_dim": 64})",
                 {"op 1", "one of forward, backward, decode, merge"});
  EXPECT_EQ(parse(with(R"("head_dim_v": 64.0)")).head_dim_v, 64);
}

// Lists of blocks are made of a spec's other masks.
TEST(Spec, MakeBlockLists) {
  const auto lists = [](const std::string& mask, const std::string& more = "") {
    return R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 64, "mask": [)" + mask + "]" + more +
           "}";
  };
  const std::string blocks = R"({"kind": "block_sparse", "of_masks": true}, )";
  EXPECT_EQ(parse(lists(blocks + R"("causal")")).to_json(),
            lists(R"("causal", {"kind": "block_sparse", "of_masks": true})"));
  expect_unsupported(lists(R"("causal")"), {"without a block_sparse mask with of_masks", "would work"});
  expect_unsupported(lists(R"("causal", "block_sparse")"), {"without a block_sparse mask with of_masks"});
  for (const char* formula : {"key < 9 * head", "key < 9 * head_kv"})
    expect_invalid(lists(blocks + '"' + formula + '"'), {"reads head or head_kv", "\"per_head\": true"});
  expect_unsupported(lists(blocks + R"("causal")", R"(, "score": ["softcap"])"),
                     {"score", "op make_block_lists", "leaving it out"});
}

TEST(Spec, Words) {
  expect_invalid(R"({"op": "foward", "dtype": "bf16", "head_dim": 64})",
                 {"op \"foward\"", "did you mean forward?"});
  expect_invalid(R"({"op": "forward", "dtype": "bfloat16", "head_dim": 64})",
                 {"bf16, fp16 and fp32", "mean bf16?"});
  expect_invalid(R"({"op": "forward", "dtype": "int32", "head_dim": 64})", {"dtype \"int32\""});
  expect_invalid(with(R"("mask": ["causal", "casual"])"), {"mask[1] \"casual\"", "did you mean causal?"});
  expect_invalid(with(R"("mask": [{"kind": "causal", "align": "bottomright"}])"),
                 {"mask[0].align \"bottomright\"", "did you mean bottom_right?"});
  expect_invalid(with("\"mask\": [\"a\\nb\"]"), {"mask[0] \"a?b\""});
}

TEST(Spec, Numbers) {
  const auto head_dim = [](const std::string& value) {
    return R"({"op": "forward", "dtype": "bf16", "head_dim": )" + value + "}";
  };
  expect_invalid(head_dim("100"),
                 {"head_dim 100", "multiple of 8 between 8 and 1024", "96 or 104 would work"});
  expect_invalid(head_dim("0"), {"head_dim 0", "; 8 would work"});
  expect_invalid(head_dim("-64"), {"head_dim -64", "; 8 would work"});
  expect_invalid(head_dim("257"), {"head_dim 257", "; 256 or 264 would work"});
  expect_invalid(head_dim("1025"), {"head_dim 1025", "not between 8 and 1024; 1024 would work"});
  expect_invalid(head_dim("1e30"), {"head_dim 1e+30", "out of range"});
  expect_invalid(head_dim("99999999999999999999"), {"head_dim", "out of range"});
  expect_invalid(head_dim("4294967424"), {"head_dim 4294967424", "out of range"});
  expect_invalid(with(R"("head_dim_v": 0)"), {"head_dim_v 0", "8 would work"});
  expect_invalid(with(R"("head_dim_v": 12)"), {"head_dim_v 12", "8 or 16 would work"});
  expect_invalid(with(R"("config": {"block_m": -64})"),
                 {"config.block_m -64", "not between 16 and 1024", "; 16 would work"});
  expect_invalid(with(R"("config": {"block_n": 100})"), {"config.block_n 100", "96 or 112"});
  expect_invalid(with(R"("config": {"num_stages": 0})"),
                 {"config.num_stages 0", "between 1 and 8", "1 would work"});
  expect_invalid(with(R"("config": {"num_warps": 1000})"), {"config.num_warps 1000", "32 would work"});
}

TEST(Spec, OutputInFloat) {
  EXPECT_EQ(parse(with(R"("o_dtype": "fp32")")).to_json(),
            R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "o_dtype": "fp32"})");
  EXPECT_EQ(parse(R"({"op": "forward", "dtype": "fp32", "head_dim": 64, "o_dtype": "fp32"})").o_dtype,
            std::nullopt);
}

TEST(Spec, Rotary) {
  const auto append = [](const std::string& rotary) {
    return R"({"op": "append_kv", "dtype": "bf16", "head_dim": 128, "rotary": )" + rotary + "}";
  };
  EXPECT_EQ(parse(append("{}")).to_json(), append(R"({"style": "half"})"));
  EXPECT_EQ(parse(append(R"({"dim": 128, "tables": "fp32", "q": true, "style": "interleaved"})")).to_json(),
            append(R"({"style": "interleaved", "q": true, "tables": "fp32"})"));
  EXPECT_EQ(parse(append(R"({"dim": 22})")).to_json(), append(R"({"style": "half", "dim": 22})"));
  EXPECT_NE(parse(append(R"({"q": true})")).hash(), parse(append("{}")).hash());
  expect_invalid(append(R"({"dim": 130})"), {"rotary.dim 130", "between 2 and 128", "128 would work"});
  for (const char* dims :
       {R"("head_dim": 264, "rotary": {"dim": 258})", R"("head_dim": 256, "rotary": {"dim": 258})"})
    expect_invalid(R"({"op": "append_kv", "dtype": "bf16", )" + std::string(dims) + "}",
                   {"rotary.dim 258", "between 2 and 256", "256 would work"});
  expect_unsupported(R"({"op": "append_kv", "dtype": "bf16", "head_dim": 264, "rotary": {}})",
                     {"rotary of all 264 columns", "\"dim\": 256 or less would work"});
  EXPECT_EQ(parse(append(R"({"first": 64, "dim": 64})")).to_json(),
            append(R"({"style": "half", "first": 64})"));
  expect_invalid(append(R"({"first": 128})"), {"rotary.first 128", "between 0 and 120", "120 would work"});
  expect_invalid(append(R"({"first": 12})"), {"rotary.first 12", "multiple of 8", "8 or 16 would work"});
  expect_invalid(append(R"({"first": 64, "dim": 66})"), {"rotary.dim 66", "between 2 and 64"});
  expect_unsupported(R"({"op": "append_kv", "dtype": "bf16", "head_dim": 576, "rotary": {"first": 64}})",
                     {"rotary of all 512 columns of head_dim from first on", "\"dim\": 256 or less"});
  expect_invalid(append(R"({"dim": 21})"), {"rotary.dim 21", "multiple of 2", "20 or 22 would work"});
  expect_invalid(append(R"({"dim": 0})"), {"rotary.dim 0"});
  expect_invalid(append(R"({"tables": "fp16"})"), {"rotary.tables fp16 is neither fp32 nor the dtype, bf16"});
  expect_invalid(append(R"({"stile": "half"})"), {"unknown field \"rotary.stile\"", "did you mean style?"});
  expect_invalid(append(R"("half")"), {"rotary \"half\" must be an object"});
  expect_unsupported(with(R"("rotary": {})"), {"rotary", "op forward", "leaving it out would work"});
  expect_unsupported(R"({"op": "append_kv", "dtype": "bf16", "head_dim": 64, "mask": ["causal"]})",
                     {"op append_kv", "leaving it out would work"});
}

TEST(Spec, DecodeThatAppends) {
  const auto decode = [](const std::string& rest) {
    return R"({"op": "decode", "dtype": "bf16", "head_dim": 128)" + rest + "}";
  };
  EXPECT_EQ(parse(decode(R"(, "rotary": {"q": true}, "append": true)")).to_json(),
            decode(R"(, "append": true, "rotary": {"style": "half", "q": true})"));
  EXPECT_EQ(parse(decode(R"(, "append": false)")).to_json(), decode(""));
  EXPECT_NE(parse(decode(R"(, "append": true)")).hash(), parse(decode("")).hash());
  expect_unsupported(decode(R"(, "rotary": {})"), {"rotary", "appends nothing", "\"append\": true"});
  expect_unsupported(with(R"("append": true)"), {"append true", "op forward", "false would work"});
  expect_unsupported(R"({"op": "append_kv", "dtype": "bf16", "head_dim": 128, "append": true})",
                     {"append true", "op append_kv"});
}

TEST(Spec, KnownButUnsupported) {
  expect_unsupported(with(R"("parts_dtype": "bf16")"), {"parts_dtype \"bf16\"", "leaving it out would work"});
  expect_invalid(with(R"("o_dtype": "fp16")"),
                 {"o_dtype fp16 is neither fp32 nor the dtype, bf16", "leaving it out would work"});
  expect_invalid(with(R"("parts_dtype": "int32")"), {"parts_dtype \"int32\"", "bf16, fp16 and fp32"});
}

TEST(Spec, ForwardWithPages) {
  EXPECT_EQ(parse(with(R"("mask": ["padding"], "dropout": true, "varlen": true, "paged": true)")).to_json(),
            R"({"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["padding"], "dropout": true, )"
            R"("varlen": true, "paged": true})");
  expect_unsupported(R"({"op": "merge", "dtype": "bf16", "head_dim": 64, "paged": true})",
                     {"paged true is not supported by op merge; false would work"});
}

TEST(Spec, EightBitKeysAndValues) {
  const auto decode = [](const std::string& rest) {
    return R"({"op": "decode", "dtype": "bf16", "head_dim": 128)" + rest + "}";
  };
  EXPECT_EQ(parse(decode(R"(, "kv_dtype": "bf16")")).to_json(), decode(""));
  expect_invalid(decode(R"(, "kv_dtype": "fp16")"), {"kv_dtype fp16", "int8, fp8_e4m3, fp8_e5m2"});
  const std::string latent =
      R"({"op": "decode", "dtype": "bf16", "head_dim": 576, "head_dim_v": 512, "v_in_k": true, )"
      R"("kv_dtype": "fp8_ds_mla")";
  EXPECT_EQ(parse(latent + "}").key_elements(), 656);
  EXPECT_EQ(parse(R"({"op": "append_kv")" + latent.substr(15) + "}").key_elements(), 656);
  expect_unsupported(decode(R"(, "kv_dtype": "fp8_ds_mla")"), {"head_dim 576, head_dim_v 512", "v_in_k"});
  expect_unsupported(latent + R"(, "kv_scale": "token_head"})", {"whose rows hold their scales"});
  expect_unsupported(R"({"op": "forward", "paged": true)" + latent.substr(15) + "}",
                     {"kv_dtype fp8_ds_mla is not supported by op forward; decode or append_kv would work"});
  expect_invalid(decode(R"(, "kv_dtype": "int4")"), {"kv_dtype \"int4\"", "did you mean int8"});
  expect_unsupported(decode(R"(, "kv_scale": "head")"), {"kv_scale head has no meaning without kv_dtype"});
  expect_invalid(decode(R"(, "kv_dtype": "int8", "kv_scale": "row")"), {"kv_scale \"row\"", "token_head"});
  expect_unsupported(R"({"op": "decode", "dtype": "fp32", "head_dim": 128, "kv_dtype": "int8"})",
                     {"kv_dtype int8", "dtype fp32", "bf16 or fp16 would work"});
  expect_unsupported(with(R"("kv_dtype": "fp8_e4m3")"),
                     {"kv_dtype fp8_e4m3", "\"paged\": true or op decode"});
  expect_unsupported(with(R"("paged": true, "kv_dtype": "fp8_e4m3", "dropout": true)"),
                     {"kv_dtype fp8_e4m3", "dropout", "leaving either out would work"});
}

TEST(Spec, Decode) {
  const auto decode = [](const std::string& rest) {
    return R"({"op": "decode", "dtype": "bf16", "head_dim": 128)" + rest + "}";
  };
  EXPECT_TRUE(parse(decode(R"(, "paged": true)")).paged);
  EXPECT_EQ(parse(decode(R"(, "paged": false)")).to_json(), decode(""));
  EXPECT_EQ(parse(decode(R"(, "mask": ["tree", "causal"], "lse": false,
                            "varlen": true, "paged": true, "o_dtype": "fp32")"))
                .to_json(),
            decode(R"(, "mask": ["causal", "tree"], "lse": false, )"
                   R"("varlen": true, "paged": true, "o_dtype": "fp32")"));
  expect_unsupported(decode(R"(, "mask": ["padding"])"), {"mask padding", "leaving it out would work"});
  expect_unsupported(decode(R"(, "mask": ["block_sparse"])"), {"mask block_sparse", "leaving it out"});
  expect_unsupported(decode(R"(, "dropout": true)"), {"dropout true", "false would work"});
  expect_unsupported(decode(R"(, "parts_dtype": "bf16")"), {"parts_dtype", "leaving it out would work"});
}

// A head that no kernel of the operation takes is no wrong spec: a later version may take it.
TEST(Spec, HeadsThatNoKernelTakes) {
  for (const char* op : {"forward", "backward", "decode", "merge", "append_kv"}) {
    const auto spec = [&](const std::string& dims) {
      return R"({"op": ")" + std::string(op) + R"(", "dtype": "bf16", "head_dim": )" + dims + "}";
    };
    const std::string rule =
        "is more than 1024, the largest of op " + std::string(op) + "'s kernels; 1024 would";
    for (const char* dim : {"1032", "2048", "2147483640"})
      expect_unsupported(spec(dim), {(std::string("head_dim ") + dim).c_str(), rule.c_str()});
    expect_unsupported(spec(R"(64, "head_dim_v": 1032)"), {"head_dim_v 1032", rule.c_str()});
    EXPECT_EQ(parse(spec(R"(1024, "head_dim_v": 512)")).head_dim, 1024);
  }
}

TEST(Spec, MasksThatContradict) {
  expect_invalid(with(R"("mask": ["causal", {"kind": "causal", "align": "top_left"}])"),
                 {"two of kind causal", "top_left", "one of them would work"});
  expect_invalid(with(R"("mask": ["sliding_window", {"kind": "sliding_window", "sinks": true}])"),
                 {"two of kind sliding_window", "one of them would work"});
  expect_invalid(with(R"("mask": ["block_sparse", {"kind": "block_sparse", "block_m": 64}])"),
                 {"two of kind block_sparse", "one list"});
  expect_invalid(with(R"("mask": ["causal", {"kind": "sliding_window", "align": "top_left"}])"),
                 {"causal with align bottom_right", "sliding_window with align top_left", "one align"});
  expect_invalid(with(R"("mask": ["tree", {"kind": "causal", "align": "top_left"}])"),
                 {"tree", "top_left", "bottom_right would work"});
  for (const char* fields : {"", R"(, "sinks": true)", R"(, "align": "top_left")"})
    expect_unsupported(
        with(R"("mask": ["tree", {"kind": "sliding_window")" + std::string(fields) + "}]"),
        {"tree with sliding_window", "leaving sliding_window out would work", "depth[batch, row]"});
  EXPECT_NO_THROW(parse(with(
      R"("mask": ["tree", "key >= seqlen_k - seqlen_q + depth[batch, row] - window"], "scalars": {"window": "int32"},
         "tables": {"depth": {"dtype": "int32", "shape": ["batch", "seqlen_q"]}})")));
  expect_unsupported(with(R"("mask": [{"kind": "block_sparse", "of_masks": true}])"),
                     {"of_masks", "without another mask", "one more mask"});
  expect_invalid(with(R"("mask": [{"kind": "block_sparse", "block_m": 100}])"),
                 {"block_m 100", "96 or 112 would work"});
  expect_invalid(with(R"("mask": [{"kind": "block_sparse", "block_n": 512}])"),
                 {"block_n 512", "256 would work"});
  expect_invalid(with(R"("mask": [{"kind": "block_sparse", "block_n": 0}])"), {"block_n 0", "16 would work"});
  expect_invalid(with(R"("mask": [{"kind": "padding", "keys": true}])"),
                 {"mask[0].keys", "the fields are kind"});
}

// Any text gives an error, or a spec whose own text gives the same spec again.
TEST(Spec, AnyText) {
  const unsigned seed = 20261121;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const std::string valid =
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "head_dim_v": 96, "mask": ["causal",)"
      R"({"kind": "block_sparse", "block_m": 64}, "tree"], "lse": false, "config": {"block_m": 128, "num_stages": 2}})";
  int accepted = 0;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    std::string text = valid;
    for (int edits = 1 + random() % 3; edits > 0; --edits) {
      const std::size_t at = random() % text.size(), count = random() % 4;
      switch (random() % 4) {
        case 0:
          text.erase(at, count);
          break;
        case 1:
          text.insert(at, text.substr(random() % text.size(), random() % 12));
          break;
        case 2:
          text[at] = static_cast<char>(random());
          break;
        case 3:
          text[at] = "0123456789-.eE{}[],:\"\\ "[random() % 23];
          break;
      }
      if (text.empty()) text = " ";
    }
    try {
      const AttentionSpec spec = parse(text);
      ++accepted;
      ASSERT_EQ(parse(spec.to_json()), spec) << text;
      ASSERT_EQ(spec.validated(), spec) << text;
    } catch (const Error& error) {
      ASSERT_TRUE(error.code() == ErrorCode::invalid_spec || error.code() == ErrorCode::unsupported) << text;
    }
  }
  EXPECT_GT(accepted, 100);
}

}  // namespace
}  // namespace flashjit
