// The bound of the work that a spec's formulas may be to compilers.
#include "codegen/formulas/formula_work.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "codegen/spec/spec.hpp"
#include "expect_error.h"

namespace flashjit {
namespace {

std::string joined(const char* between, int count, const std::string& text) {
  // In halves, so that no chain is deep.
  if (count == 1) return text;
  return "(" + joined(between, count / 2, text) + between + joined(between, count - count / 2, text) + ")";
}

// All formulas of a spec, and what a backward makes of them, have one bound of work.
TEST(FormulaSpec, WorkIsBounded) {
  const auto list = [](const char* field, std::vector<std::string> formulas) {
    std::string text;
    for (const std::string& formula : formulas) text += (text.empty() ? "\"" : ", \"") + formula + "\"";
    return "\"" + std::string(field) + "\": [" + text + "]";
  };
  const auto accepted = [](const std::string& more, const char* op = "forward") {
    return AttentionSpec::from_json(std::string(R"({"op": ")") + op +
                                    R"(", "dtype": "fp32", "head_dim": 64, )" + more + "}");
  };
  const auto refused = [&](const std::string& more, const std::string& where, const char* op = "forward") {
    expect_error(ErrorCode::invalid_spec, {where.c_str(), "1024 operations"}, [&] { accepted(more, op); });
  };
  // Operations of masks count 4: 128 comparisons, joined by 127 operators, and one more.
  const std::string half = joined("&&", 64, "key<9"), all = "!" + joined("&&", 128, "key<9");
  accepted(list("mask", {all}));
  refused(list("mask", {"!" + all}), "mask[0] \"!!");
  accepted(list("mask", {half, "!" + half}));
  refused(list("mask", {half, "!" + half, "key<1&&key<2"}), "mask[2] \"key<1&&key<2\"");
  refused(list("mask", {half}) + ", " + list("score", {joined("+", 31, "exp(score)")}), "score[0]");
  // Functions, divisions and elements of tables count more.
  const auto score = [&](int count, const std::string& text) {
    return list("score", {joined("+", count, text)});
  };
  accepted(score(60, "exp(score)"));
  refused(score(61, "exp(score)"), "score[0]");
  accepted(score(7, "1.0*(key/row)"));
  refused(score(8, "1.0*(key%row)"), "score[0]");
  const std::string quotients = joined("+", 171, "1.0*(key/7)");
  accepted(list("score", {quotients, quotients}));
  refused(list("score", {quotients, quotients, "score+score"}), "score[2]");
  const std::string table = R"("tables": {"t": {"dtype": "fp32", "shape": ["seqlen_k"], "grad": true}}, )";
  accepted(table + score(60, "t[key]"));
  refused(table + score(61, "t[key]"), "score[0]");
  // A backward adds one derivative for each read of an element, and those of a product grow as its square.
  refused(table + score(60, "t[key]"), "score[0]", "backward");
  accepted(list("score", {joined("*", 28, "score")}), "backward");
  refused(list("score", {joined("*", 36, "score")}), "score[0]", "backward");
  accepted(list("score", {joined("*", 300, "score")}));
}

}  // namespace
}  // namespace flashjit
