// Formulas: their parser, its messages, and their canonical text.
#include "codegen/formulas/formula.hpp"
#include "codegen/formulas/formula_patterns.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "codegen/formulas/formula_functors.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/formulas/write_out.hpp"
#include "codegen/spec/builtin_names.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/spec_fields.hpp"
#include "expect_error.h"

namespace flashjit {
namespace {

using Kind = TableDimension::Kind;

// Declares a table of each form and a scalar of each type.
AttentionSpec declarations() {
  AttentionSpec spec{.head_dim = 64};
  const auto table = [&](const char* name, DType dtype, std::initializer_list<const char*> shape) {
    DeclaredTable declared{name, dtype};
    for (const char* dim : shape) declared.shape.push_back(dimension_of(dim));
    spec.tables.push_back(declared);
  };
  table("slope", DType::fp32, {"heads_q"});
  table("document", DType::int32, {"batch", "seqlen_k"});
  table("bias", DType::bf16, {"batch or 1", "heads_q", "buckets"});
  table("seen", DType::uint8, {"rows", "columns"});
  spec.scalars = {{"cap", DType::fp32}, {"reach", DType::int32}};
  return spec;
}

std::string canonical(const std::string& text, FormulaUse use = FormulaUse::score) {
  const AttentionSpec spec = declarations();
  return formula_text(parse_formula(text, use, spec), spec);
}
std::string canonical_mask(const std::string& text) {
  return canonical(text, FormulaUse::mask);
}

TEST(Formula, CanonicalTextHasSpacesAndNeededBracketsOnly) {
  const std::pair<const char*, const char*> scores[] = {
      {"score", "score"},
      {" ( (score) )\t", "score"},
      {"score+slope[head]*(key-position)", "score + slope[head] * (key - position)"},
      {"30*tanh(score/30)", "30.0 * tanh(score / 30.0)"},
      {"30.0 * tanh((score / 3e1))", "30.0 * tanh(score / 30.0)"},
      {"(1 + 2) + 3", "1 + 2 + 3"},
      {"1 + (2 + 3)", "1 + (2 + 3)"},
      {"(2 * 3) + 4", "2 * 3 + 4"},
      {"2 * (3 + 4)", "2 * (3 + 4)"},
      {"8 / (4 / 2) % 3", "8 / (4 / 2) % 3"},
      {"-(1 + 2)", "-(1 + 2)"},
      {"-(-key)", "--key"},
      {"1 - -2", "1 - -2"},
      {"key < row ? 1 : row < 3 ? 2 : 4", "key < row ? 1 : row < 3 ? 2 : 4"},
      {"(key < row ? 1 : 2) + 3", "(key < row ? 1 : 2) + 3"},
      {"(key < 3 ? row < 4 : row < 5) ? score : -inf", "(key < 3 ? row < 4 : row < 5) ? score : -inf"},
      {"key<row?1:score", "key < row ? 1.0 : score"},
      {"min(key, 2.5)", "min(key, 2.5)"},
      {"max(abs(key), floor(score))", "max(abs(key), floor(score))"},
      {"floor(key / 2)", "key / 2"},
      {"cap * reach", "cap * reach"},
      {"bias[row] + bias[batch, head, row]", "bias[batch, head, row] + bias[batch, head, row]"},
      {"seen[reach, 3]", "seen[reach, 3]"},
      {"0.1 + 16777217.0 + 1e20 + .5 + 2.", "0.1 + 16777216.0 + 1e+20 + 0.5 + 2.0"},
  };
  for (const auto& [text, expected] : scores) {
    EXPECT_EQ(canonical(text), expected);
    EXPECT_EQ(canonical(expected), expected);
  }
  const std::pair<const char*, const char*> masks[] = {
      {"document[key]==document[batch,position]", "document[batch, key] == document[batch, position]"},
      {"(key<=position)&&(position-key<1024)", "key <= position && position - key < 1024"},
      {"!(key < 3) || key < 5 && row < 2", "!(key < 3) || key < 5 && row < 2"},
      {"(key < 5 || row < 2) && seen[row, key] != 0", "(key < 5 || row < 2) && seen[row, key] != 0"},
      {"key < 1 && (key < 2 && key < 3)", "key < 1 && (key < 2 && key < 3)"},
      {"batch + head + head_kv + seqlen_q + seqlen_k > 0",
       "batch + head + head_kv + seqlen_q + seqlen_k > 0"},
  };
  for (const auto& [text, expected] : masks) {
    EXPECT_EQ(canonical_mask(text), expected);
    EXPECT_EQ(canonical_mask(expected), expected);
  }
}

TEST(Formula, Types) {
  const AttentionSpec spec = declarations();
  const auto type = [&](const char* text) {
    const FormulaNode formula = parse_formula(text, FormulaUse::score, spec);
    // A real formula is itself, an integer one is converted.
    const bool converted =
        formula.kind == FormulaNode::Kind::operation && formula.operation == FormulaOperation::to_real;
    EXPECT_EQ(formula.type, FormulaType::real) << text;
    return converted ? formula.operands.front().type : formula.type;
  };
  for (const char* text : {"key + 1", "reach", "document[key]", "seen[0, 0]", "floor(score)", "-key",
                           "key % 2", "abs(key)", "min(key, 3)", "row < key ? 1 + 1 : key"})
    EXPECT_EQ(type(text), FormulaType::integer) << text;
  for (const char* text : {"score", "3", "inf", "cap", "slope[0]", "bias[0]", "key + 1.0", "exp(key)",
                           "min(key, 0.5)", "row < key ? 1 : 0.5"})
    EXPECT_EQ(type(text), FormulaType::real) << text;
}

// Each mistake: the column, what is wrong, what would work.
TEST(Formula, MistakesNameTheirColumn) {
  const struct {
    const char *text, *column, *what;
  } mistakes[] = {
      {"", "column 1: ", "the formula is empty"},
      {"  ", "column 1: ", "the formula is empty"},
      {"score + slop[head]", "column 9: ", "unknown name \"slop\"; did you mean slope?"},
      {"score + kv_idx", "column 9: ", "did you mean key?"},
      {"score + lim[key]", "column 9: ", "unknown name \"lim\"; \"tables\" and \"scalars\" declare names"},
      {"score + zzzzzzzzzz", "column 9: ", "\"tables\" and \"scalars\" declare names"},
      {"score +", "column 8: ", "the formula ends where a number, a name or a bracket is expected"},
      {"score + * 2", "column 9: ", "\"*\" stands where a number"},
      {"score score", "column 7: ", "an operator is missing before \"score\""},
      {"(score", "column 7: ", ") is missing: the ( of column 1 is open"},
      {"score)", "column 6: ", ") has no beginning"},
      {"score, 1", "column 6: ", ", has no beginning"},
      {"tanh(score", "column 11: ", ") is missing: the ( of column 5 is open"},
      {"slope[head", "column 11: ", "] is missing: the [ of column 6 is open"},
      {"slope[head)", "column 11: ", "] is missing"},
      {"tanh", "column 1: ", "tanh is a function; tanh(x) would work"},
      {"min(1)", "column 1: ", "min takes 2 operands, here it has 1"},
      {"1 + tanh(score, 2)", "column 5: ", "tanh takes 1 operand, here it has 2"},
      {"key(3)", "column 1: ", "key is no function; the functions are abs, min"},
      {"key[3]", "column 1: ", "key is no table"},
      {"slope", "column 1: ", "slope is a table [heads_q]; slope[head] would work"},
      {"slope[]", "column 1: ", "here it has 0 indices; slope[head] would work"},
      {"bias[head, row]", "column 1: ", "bias[batch, head, 0] or bias[0] would work"},
      {"slope[head, row]", "column 1: ", "here it has 2 indices"},
      {"slope[0.5]",
       "column 7: ", "an index of slope must be an integer, this is a real; floor(x) would work"},
      {"slope[key < 3]", "column 7: ", "an index of slope must be a number, this is a condition"},
      {"(key < 3) + 1", "column 1: ", "the left operand of + must be a number, this is a condition"},
      {"1 + (key < 3)", "column 5: ", "condition ? 1 : 0 would work"},
      {"-(key < 3)", "column 2: ", "the operand of - must be a number"},
      {"!key ? 1 : 2", "column 2: ", "the operand of ! must be a condition, this is an integer"},
      {"key && row ? 1 : 2", "column 1: ", "the left operand of && must be a condition, this is an integer"},
      {"key < 1 || 0.5 ? 1 : 2",
       "column 12: ", "the right operand of || must be a condition, this is a real"},
      {"0 <= key < 5 ? 1 : 2", "column 10: ", "a < b && b < c would work"},
      {"(key < 1) == (row < 1) ? 1 : 2", "column 11: ", "a ? b : !b would work"},
      {"key ? 1 : 2", "column 1: ", "the operand before ? must be a condition"},
      {"key < 1 ? 2", "column 12: ", ": is missing: the ? of column 9 is open"},
      {"key < 1 ? 2 : row < 3", "column 9: ", "the values of ?: are an integer and a condition"},
      {"score % 2", "column 1: ", "the left operand of % must be an integer, this is a real"},
      {"2 % score", "column 5: ", "the right operand of % must be an integer"},
      {"key < 3", "column 1: ", "condition ? score : -inf would work"},
      {"score = 1", "column 7: ", "== compares"},
      {"score & 1", "column 7: ", "&& would work"},
      {"score ^ 2", "column 7: ", "x * x"},
      {"score; 1", "column 6: ", "\";\" is in no formula"},
      {"score + \xc3\xa9", "column 9: ", "letters outside ASCII"},
      {"30f * score", "column 1: ", "\"30f\" is no number"},
      {"1.2.3", "column 1: ", "\"1.2.3\" is no number"},
      {"0x10", "column 1: ", "\"0x10\" is no number"},
      {"010", "column 1: ", "octal"},
      {"score + 2147483648", "column 9: ", "beyond int32"},
      {"1e39", "column 1: ", "beyond float32"},
      {"1e-39", "column 1: ", "beyond float32"},
  };
  for (const auto& mistake : mistakes) {
    SCOPED_TRACE(mistake.text);
    expect_error(ErrorCode::invalid_spec, {mistake.column, mistake.what}, [&] { canonical(mistake.text); });
  }
  expect_error(ErrorCode::invalid_spec, {"column 1: ", "must be a condition, this one is an integer"},
               [] { canonical_mask("key"); });
  expect_error(ErrorCode::invalid_spec, {"column 1: ", "a mask does not know the score"},
               [] { canonical_mask("score > 0"); });
}

TEST(Formula, Limits) {
  const auto repeat = [](int count, const std::string& text) {
    std::string all;
    for (int i = 0; i < count; ++i) all += text;
    return all;
  };
  const auto deep = [](const std::string& text) {
    expect_error(ErrorCode::invalid_spec, {"column ", "nests deeper than 64 levels"},
                 [&] { canonical(text); });
  };
  EXPECT_EQ(canonical(repeat(64, "(") + "1" + repeat(64, ")")), "1.0");
  deep(repeat(65, "(") + "1" + repeat(65, ")"));
  deep(repeat(4000, "("));
  deep(repeat(4000, "-") + "1");
  deep(repeat(1000, "!") + "(key < 1)");
  deep(repeat(300, "key<1?1:") + "2");
  deep(repeat(65, "-") + "key");
  for (const std::string& text :
       {repeat(63, "-") + "key", "key" + repeat(63, " + 1"), repeat(62, "abs(") + "key + 1" + repeat(62, ")"),
        repeat(21, "-(key < 1 ? ") + "1" + repeat(21, " : 0)")})
    EXPECT_EQ(canonical(canonical(text)), canonical(text));
  deep("key" + repeat(64, " + 1"));
  EXPECT_EQ(canonical(repeat(4095, " ") + "1"), "1.0");
  expect_error(ErrorCode::invalid_spec, {"4097 characters, at most 4096"},
               [&] { canonical(repeat(4096, " ") + "1"); });
}

std::string spec_with(const std::string& more) {
  return R"({"op": "forward", "dtype": "bf16", "head_dim": 128, )" + more + "}";
}
void expect_mistake(const std::string& more, std::initializer_list<const char*> parts) {
  SCOPED_TRACE(more);
  expect_error(ErrorCode::invalid_spec, parts, [&] { AttentionSpec::from_json(spec_with(more)); });
}

constexpr char document[] = R"(, "tables": {"document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}})";

// Such masks are as fast as built-in ones: their elements need no formula.
TEST(FormulaFunctors, MasksThatKeepAnIntervalOfKeysForEachRow) {
  const std::pair<const char*, bool> masks[] = {
      {"key <= position", true},
      {"position >= key && row > key", true},
      {"position - key < 1024 && key <= position", true},
      {"key - row <= reach && reach < key - position", true},
      {"key < document[batch, row] || key <= position", true},
      {"key >= 3 || key == position", false},  // an end and a beginning
      {"key < 3 || key > position", false},
      {"key != position", false},
      {"key % 2 == 0", false},
      {"row < 5", false},
      {"row + key < 5", false},           // may wrap
      {"reach - key < position", false},  // may wrap
      {"position - key < key", false},
      {"document[batch, key] == 1", false},
      {"key <= position && head < 3", false},
      {"key <= head", false},
      {"key < 2.5", false},
  };
  for (const auto& [mask, interval] : masks)
    EXPECT_EQ(is_interval(FormulaMask{mask}, declarations()), interval) << mask;
}

// The multiplication by such a cap is left to the softmax.
TEST(FormulaFunctors, Caps) {
  const std::pair<const char*, bool> scores[] = {
      {"cap * tanh(score / cap)", true},
      {"30 * tanh(score / 30)", true},
      {"2.5 * tanh((score + key) / 2.5)", true},
      {"-30 * tanh(score / -30)", false},
      {"0 * tanh(score / 0)", false},
      {"cap * tanh(score / 30)", false},
      {"30 * tanh(score / 20)", false},
      {"reach * tanh(score / reach)", false},  // an integer
      {"slope[head] * tanh(score / slope[head])", false},
      {"tanh(score / cap)", false},
  };
  for (const auto& [score, caps] : scores) {
    AttentionSpec spec = declarations();
    spec.score = {score};
    EXPECT_EQ(formula_functors(spec).find("bool caps = true") != std::string::npos, caps) << score;
  }
}

// They cost a multiply-add for each score.
TEST(FormulaFunctors, ScoresLinearInTheKey) {
  const std::pair<const char*, const char*> scores[] = {
      {"score + slope[head] * (key - position)", "false return (row.a);"},
      {"score - slope[head] * (position - key)", "false return (row.a);"},
      {"score - slope[head] * abs(position - key)", "true return -(row.a);"},
      {"abs(key - row) * cap + score", "true return (at.read(scalar_cap()));"},
      {"score + cap * (row - key)", "false return -(at.read(scalar_cap()));"},
      {"score + 0.5 * abs(key - position)", "true return (Real(0.5f));"},
      {"score + slope[head] * (key - seqlen_k)", ""},
      {"score + bias[0, head, key - position]", ""},
      {"score + cap * min(key - position, 3)", ""},
      {"score * 2 + cap * (key - position)", ""},
      {"score + score * (key - position)", ""},
      {"cap * (key - position) - score", ""},
  };
  for (const auto& [score, tilt] : scores) {
    AttentionSpec spec = declarations();
    spec.score = {score};
    const std::string text = formula_functors(spec);
    const auto magnitude = text.find("tilts_by_magnitude = "), value = text.find(" auto tilt(");
    std::string found;
    if (magnitude != std::string::npos) {
      const auto from = magnitude + 21, body = text.find("return", value);
      found = text.substr(from, text.find(';', from) - from) + " " +
              text.substr(body, text.find(';', body) + 1 - body);
    }
    EXPECT_EQ(found, tilt) << score;
  }
}

TEST(FormulaSpec, Mistakes) {
  expect_mistake(R"("score": "score")", {"score \"score\"", "must be a list of formulas"});
  expect_mistake(R"("score": [1])", {"score[0] 1", "must be a formula"});
  expect_mistake(R"("score": ["score", "score +"])", {"score[1] \"score +\", column 8: "});
  expect_mistake(R"("score": ["sofcap"])",
                 {"score[0] \"sofcap\"", "softcap, alibi and bias", "did you mean softcap?"});
  expect_mistake(R"("mask": ["causal", "key <"])", {"mask[1] \"key <\", column 6: "});
  expect_mistake(R"("mask": [{"formula": 3}])", {"mask[0].formula 3", "must be a text"});
  expect_mistake(R"("mask": [{"formula": "key < 3", "kind": "causal"}])", {"mask[0].kind"});
  expect_mistake(R"("mask": [{"formula": "causal"}])", {"mask[0] \"causal\"", "prefix_lm"});
  expect_mistake(R"("mask": ["prefixlm"])", {"did you mean prefix_lm?"});
  expect_mistake(std::string(R"("score": ["score"])") + document, {"tables.document is read by no formula"});
  expect_mistake(R"("scalars": {"cap": "fp32"})", {"scalars.cap is read by no formula"});
  expect_mistake(R"("tables": [])", {"tables a list must be an object"});
  expect_mistake(R"("tables": {"a": 1})", {"tables.a 1 must be an object"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32"}})", {"tables.a.shape", "missing"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp64", "shape": [1]}})", {"tables.a.dtype \"fp64\"", "uint8"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": []}})", {"0 dimensions", "scalars"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": [1, 1, 1, 1, 1, 1, 1]}})", {"7 dimensions"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": [0]}})", {"tables.a.shape[0] 0"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": [1.5]}})", {"tables.a.shape[0] 1.5"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": ["seqlenk"]}})", {"did you mean seqlen_k?"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": ["num_heads"]}})", {"must not contain head"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": ["x y"]}})", {"is no dimension"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": ["rows or 1"]}})", {"only batch"});
  expect_mistake(R"("tables": {"a": {"dtype": "fp32", "shape": ["total_q"]}})",
                 {"packed", "\"varlen\": true"});
  expect_mistake(R"("varlen": true, "paged": true, "tables": {"a": {"dtype": "fp32", "shape": ["total_k"]}})",
                 {"packed keys"});
  expect_mistake(R"("scalars": {"cap": "bf16"})", {"scalars.cap \"bf16\"", "fp32 and int32"});
  for (const char* name : {"score", "tanh", "inf", "head"})
    expect_mistake(R"("scalars": {")" + std::string(name) + R"(": "fp32"})", {"has a meaning in formulas"});
  for (const char* name : {"q", "lse", "softmax_scale"})
    expect_mistake(R"("scalars": {")" + std::string(name) + R"(": "fp32"})", {"is an argument of launches"});
  for (const char* name : {"", "1a", "a b", "_a"})
    expect_mistake(R"("scalars": {")" + std::string(name) + R"(": "fp32"})", {"a letter first"});
  expect_mistake(R"("scalars": {"a": "fp32"}, "tables": {"a": {"dtype": "fp32", "shape": [1]}})",
                 {"declared twice"});
  expect_mistake(R"("scalars": {"d_a": "fp32"}, "tables": {"a": {"dtype": "fp32", "shape": [1]}})",
                 {"gradient of table a"});
  std::string nine, seventeen;
  for (int i = 0; i < 17; ++i) {
    const std::string comma = i ? ", " : "", name = "\"t" + std::to_string(i) + "\": ";
    if (i < 9) nine += comma + name + R"({"dtype": "fp32", "shape": [1]})";
    seventeen += comma + name + "\"fp32\"";
  }
  expect_mistake(R"("tables": {)" + nine + "}", {"tables has 9 entries, at most 8"});
  expect_mistake(R"("scalars": {)" + seventeen + "}", {"scalars has 17 entries, at most 16"});
  expect_mistake(R"("score": ["1", "1", "1", "1", "1", "1", "1", "1", "1"])",
                 {"score has 9 entries, at most 8"});
  // Left-out indices make a longer text.
  std::string many;
  for (int i = 0; i < 4; ++i) {
    many += i ? "&&(" : "(";
    for (int j = 0; j < 50; ++j) many += j ? "&&document[key]==0" : "document[key]==0";
    many += ")";
  }
  ASSERT_LT(many.size(), 4096u);
  expect_mistake("\"mask\": [\"" + many + "\"]" + document, {"characters, at most 4096"});
}

// A cap of 0 is none: the softmax's factor would be 0 and NaN would not come of it.
TEST(FormulaSpec, OnlyCapsAboveZeroAreCaps) {
  const AttentionSpec spec{.head_dim = 64};
  const auto is_cap = [&](const char* text) {
    return cap_of(parse_formula(text, FormulaUse::score, spec)).has_value();
  };
  EXPECT_TRUE(is_cap("0.5 * tanh(score / 0.5)"));
  EXPECT_FALSE(is_cap("0.0 * tanh(score / 0.0)"));
  EXPECT_FALSE(is_cap("-0.5 * tanh(score / -0.5)"));
  EXPECT_FALSE(is_cap("0.5 * tanh(score / 0.25)"));
}

// The first part of validated(), before it asks which families compute the spec.
AttentionSpec written_out(AttentionSpec spec) {
  write_out_formulas(spec);
  return without_defaults(std::move(spec));
}

TEST(FormulaSpec, EqualFormulasGiveEqualTextAndHash) {
  AttentionSpec a = declarations(), b = declarations();
  a.score = {"cap*tanh(score/cap)", "score + bias[3] * 2 + seen[reach, 1] + slope[head]"};
  b.score = {"cap * tanh((score / cap))", "score+bias[batch,head,3]*2.0+seen[reach,1]+slope[head]"};
  a.mask = {FormulaMask{"document[key]==0"}, FormulaMask{"key<3"}, CausalMask{}};
  b.mask = {FormulaMask{"key < 3"}, CausalMask{}, FormulaMask{"(document[batch, key] == 0)"},
            FormulaMask{"key<3"}};
  std::reverse(b.tables.begin(), b.tables.end());
  std::reverse(b.scalars.begin(), b.scalars.end());
  const AttentionSpec first = written_out(a);
  EXPECT_EQ(first, written_out(b));
  EXPECT_EQ(first.hash(), written_out(b).hash());
  EXPECT_EQ(first, written_out(first));
  EXPECT_EQ(
      first.to_json(),
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, )"
      R"("mask": ["causal", "document[batch, key] == 0", "key < 3"], )"
      R"_("score": ["cap * tanh(score / cap)", )_"
      R"("score + bias[batch, head, 3] * 2.0 + seen[reach, 1] + slope[head]"], )"
      R"("tables": {"bias": {"dtype": "bf16", "shape": ["batch or 1", "heads_q", "buckets"]}, )"
      R"("document": {"dtype": "int32", "shape": ["batch", "seqlen_k"]}, )"
      R"("seen": {"dtype": "uint8", "shape": ["rows", "columns"]}, )"
      R"("slope": {"dtype": "fp32", "shape": ["heads_q"]}}, "scalars": {"cap": "fp32", "reach": "int32"}})");
}

TEST(FormulaSpec, DifferentFormulasGiveDifferentTextAndHash) {
  std::vector<AttentionSpec> specs;
  const auto add = [&](auto change) {
    AttentionSpec spec{.head_dim = 64, .score = {"softcap", "alibi"}};
    change(spec);
    specs.push_back(written_out(spec));
  };
  add([](AttentionSpec&) {});
  add([](AttentionSpec& s) { s.score = {"alibi", "softcap"}; });
  add([](AttentionSpec& s) { s.score = {"softcap", "bias"}; });
  add([](AttentionSpec& s) { s.scalars = {{"softcap", DType::int32}}; });
  add([](AttentionSpec& s) { s.tables = {{"alibi_slopes", DType::bf16, {{Kind::heads_q}}}}; });
  add([](AttentionSpec& s) { s.tables = {{"alibi_slopes", DType::fp32, {{Kind::batch}, {Kind::heads_q}}}}; });
  add([](AttentionSpec& s) { s.tables = {{"alibi_slopes", DType::fp32, {{Kind::heads_q, 0, true}}}}; });
  add([](AttentionSpec& s) { s.sink_logits = true; });
  add([](AttentionSpec& s) { s.precise = true; });
  add([](AttentionSpec& s) { s.mask = {FormulaMask{"key < 3"}}; });
  add([](AttentionSpec& s) { s.mask = {FormulaMask{"key < 4"}}; });
  for (std::size_t i = 0; i < specs.size(); ++i)
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_NE(specs[i], specs[j]);
      EXPECT_NE(specs[i].to_json(), specs[j].to_json());
      EXPECT_NE(specs[i].hash(), specs[j].hash());
    }
}

TEST(FormulaSpec, NamesStandForFormulas) {
  const AttentionSpec spec = written_out({.head_dim = 64,
                                          .mask = {FormulaMask{"prefix_lm"}},
                                          .score = {"softcap", "alibi", "bias"},
                                          .precise = true});
  EXPECT_EQ(
      spec.to_json(),
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, )"
      R"_("mask": ["key < prefix[batch] || key <= position"], "score": ["softcap * tanh(score / softcap)", )_"
      R"_("score - alibi_slopes[head] * abs(position - key)", "score + bias[batch, head, row, key]"], )_"
      R"("tables": {"alibi_slopes": {"dtype": "fp32", "shape": ["heads_q"]}, )"
      R"("bias": {"dtype": "bf16", "shape": ["batch or 1", "heads_q or 1", "seqlen_q or 1", "seqlen_k"]}, )"
      R"("prefix": {"dtype": "int32", "shape": ["batch"]}}, "scalars": {"softcap": "fp32"}, )"
      R"("precise": true})");
  EXPECT_EQ(spec, written_out(spec));
  const AttentionSpec own =
      written_out({.head_dim = 64,
                   .score = {"alibi"},
                   .tables = {{"alibi_slopes", DType::bf16, {{Kind::batch}, {Kind::heads_q}}}}});
  EXPECT_EQ(own.score.front(), "score - alibi_slopes[batch, head] * abs(position - key)");
  expect_error(ErrorCode::invalid_spec, {"tables.bias.shape has 3"}, [] {
    written_out({.head_dim = 64, .score = {"bias"}, .tables = {{"bias", DType::bf16, {{Kind::number, 3}}}}});
  });
  // Without a formula, nothing is to be precise.
  EXPECT_EQ(written_out({.head_dim = 64, .precise = true}), written_out({.head_dim = 64}));
}

// By the definition: along each dimension the window's centre is the row's place, moved into the array.
TEST(FormulaSpec, Neighbourhoods) {
  const AttentionSpec spec = written_out(
      {.head_dim = 64,
       .mask = {FormulaMask::neighbourhood({9, 16}, {5, 7}), FormulaMask::neighbourhood({12}, {3}, {2})}});
  EXPECT_EQ(
      spec.to_json(),
      R"({"op": "forward", "dtype": "bf16", "head_dim": 64, "mask": [)"
      R"("key % 2 == position % 2 && key / 2 >= max(0, min(position / 2 - 1, (13 - position % 2) / 2 - 3)) && )"
      R"(key / 2 < max(0, min(position / 2 - 1, (13 - position % 2) / 2 - 3)) + 3", )"
      R"("key / 16 >= max(0, min(position / 16 - 2, 4)) && key / 16 < max(0, min(position / 16 - 2, 4)) + 5 && )"
      R"(key % 16 >= max(0, min(position % 16 - 3, 9)) && key % 16 < max(0, min(position % 16 - 3, 9)) + 7"]})");
  EXPECT_EQ(FormulaMask::neighbourhood({5, 5}, {5, 5}).formula, "0 == 0");
  expect_mistake(R"("mask": ["neighbourhood"])", {"mask[0]", "no shape and window"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [9]}])", {"mask[0].window", "missing"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": 9, "window": [3]}])",
                 {"mask[0].shape 9", "list of 1 to 3 integers"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [9], "window": [3.5]}])", {"mask[0].window"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [9, 9], "window": [3]}])",
                 {"as many numbers"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [1, 1, 1, 1], "window": [1, 1, 1, 1]}])",
                 {"1 to 3"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [9], "window": [5], "dilation": [2]}])",
                 {"window of 5 places, 2 apart, does not fit the 9"});
  expect_mistake(R"("mask": [{"kind": "neighbourhood", "shape": [65536, 65536], "window": [1, 1]}])",
                 {"65536 places"});
}

// An operation without formulas refuses them by its features, with a short message.
TEST(FormulaSpec, OperationsWithoutFormulasRefuseThem) {
  const auto refused = [](const std::string& more, std::initializer_list<const char*> parts) {
    SCOPED_TRACE(more);
    expect_error(ErrorCode::unsupported, parts, [&] {
      AttentionSpec::from_json(R"({"op": "merge", "dtype": "bf16", "head_dim": 128, )" + more + "}");
    });
  };
  refused(R"("mask": ["key <= position"])", {"mask [\"key <= position\"] is not supported by op merge"});
  refused(R"("score": ["score / 2"])",
          {"score [\"score / 2.0\"] is not supported by op merge; leaving it out"});
  refused(R"("sink_logits": true)", {"sink_logits true is not supported by op merge; false would work"});
  refused(
      R"("score": [")" + std::string(2000, ' ') + R"(score + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1"])",
      {"..."});
}

// One JSON serves a forward and its backward: elsewhere "grad" means nothing, and changes no key.
TEST(FormulaSpec, GradientsOfTables) {
  const auto spec_of = [](const std::string& op, const std::string& dtype, const std::string& more,
                          const std::string& score = "score + slope[head]") {
    return AttentionSpec::from_json(
        R"({"op": ")" + op + R"(", "dtype": "bf16", "head_dim": 64, "score": [")" + score +
        R"("], "tables": {"slope": {"dtype": ")" + dtype + R"(", "shape": ["heads_q"])" + more + "}}}");
  };
  EXPECT_EQ(spec_of("forward", "fp32", R"(, "grad": true)").to_json(),
            spec_of("forward", "fp32", "").to_json());
  EXPECT_EQ(spec_of("decode", "fp32", R"(, "grad": true)"), spec_of("decode", "fp32", ""));
  const AttentionSpec with = spec_of("backward", "fp32", R"(, "grad": true)"),
                      without = spec_of("backward", "fp32", R"(, "grad": false)");
  EXPECT_NE(with, without);
  EXPECT_NE(with.hash(), without.hash());
  EXPECT_EQ(AttentionSpec::from_json(with.to_json()), with);
  EXPECT_EQ(with.to_json().find("grad"), with.to_json().rfind("grad"));
  EXPECT_NE(with.to_json().find(R"("shape": ["heads_q"], "grad": true})"), std::string::npos);
  EXPECT_EQ(without.to_json().find("grad"), std::string::npos);
  EXPECT_EQ(place_of_name(with, "d_slope"), 0);
  EXPECT_EQ(place_of_name(with, "slope"), 1);
  EXPECT_TRUE(declared_at(with, 0).gradient);
  EXPECT_EQ(declared_at(with, 0).name(), "d_slope");
  EXPECT_FALSE(declared_at(with, 2));
  EXPECT_EQ(place_of_name(without, "d_slope"), -1);

  const auto refused = [](std::initializer_list<const char*> parts, const auto& make) {
    expect_error(ErrorCode::invalid_spec, parts, make);
  };
  for (const char* op : {"forward", "backward"}) {
    refused({"tables.slope.grad true", "int32 are integers", "fp32, fp16 or bf16"},
            [&] { spec_of(op, "int32", R"(, "grad": true)"); });
    refused({"tables.slope.grad true", "no score reads the table", "leaving grad out"}, [&] {
      AttentionSpec::from_json(R"({"op": ")" + std::string(op) + R"(", "dtype": "bf16", "head_dim": 64,
          "mask": ["slope[head] > 0.5"], "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"], "grad": true}}})");
    });
  }
  refused({"tables.slope.grad 1 must be true or false"},
          [&] { spec_of("backward", "fp32", R"(, "grad": 1)"); });
  std::string powers = "score";
  for (int i = 0; i < 10; ++i) powers = "(" + powers + ") * (score * slope[" + std::to_string(i) + "])";
  refused({"score[0]", "its derivatives", "1024 operations"},
          [&] { spec_of("backward", "fp32", R"(, "grad": true)", powers); });
}

// The rendered text of derivatives, for the forms that codegen knows and for others.
TEST(FormulaSpec, Derivatives) {
  const auto functors = [](const std::string& score, bool by_key = false) {
    const AttentionSpec spec = AttentionSpec::from_json(
        R"({"op": "backward", "dtype": "bf16", "head_dim": 64, "score": [")" + score +
        R"("], "scalars": {"cap": "fp32"}, "tables": {"bias": {"dtype": "fp32", "shape": ["n"], "grad": true}}})");
    return formula_functors(spec, by_key ? ComputedAhead::key : ComputedAhead::row);
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  has(functors("score + cap * bias[key]"), "shifts = true");
  has(functors("score + cap * bias[key]"), "add(Read<0>(), table_bias(), at.read(scalar_cap()), at.key);");
  has(functors("score * bias[key] + cap"), "return at.read(table_bias(), at.key);");
  has(functors("score + cap + bias[row] * bias[row]"), "Read<0>");
  EXPECT_EQ(functors("score + cap + bias[row] * bias[row]").find("Read<1>"), std::string::npos);
  has(functors("score + cap + bias[row] * bias[key]"), "Read<1>");
  has(functors("abs(score) + cap + bias[row]"),
      "select(at.score < Real(0.0f), Real(-1.0f), select(at.score > Real(0.0f), Real(1.0f), Real(0.0f)))");
  has(functors("score + cap + bias[3]", true), "return row_values(at.read(table_bias(), Integer(3)));");
  has(functors("score + cap + bias[key]", true), "by_key = true");
  const std::string capped =
      formula_functors(AttentionSpec::from_json(R"({"op": "backward", "dtype": "bf16", "head_dim": 64,
          "score": ["softcap"]})"));
  has(capped, "return fma(-before_cap(at, row), before_cap(at, row), Real(1.0f));");
}

}  // namespace
}  // namespace flashjit
