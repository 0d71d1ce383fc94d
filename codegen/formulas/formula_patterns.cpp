#include "codegen/formulas/formula_patterns.hpp"

#include <algorithm>
#include <initializer_list>

#include "codegen/formulas/formula_traits.hpp"

namespace flashjit {

namespace {

using Kind = FormulaNode::Kind;
using enum FormulaOperation;

std::string call(const char* function, const std::string& a, const std::string& b) {
  return a.empty() ? b : b.empty() ? a : std::string(function) + "(" + a + ", " + b + ")";
}

FormulaOperation mirrored(FormulaOperation comparison) {
  return comparison == less            ? greater
         : comparison == less_equal    ? greater_equal
         : comparison == greater       ? less
         : comparison == greater_equal ? less_equal
                                       : comparison;
}

// key <comparison> limit
std::optional<Limits> limits_of(FormulaOperation comparison, const std::string& limit) {
  const std::string after = "bounded_sum(" + limit + ", Integer(1))";
  if (comparison == less) return Limits{{}, limit};
  if (comparison == less_equal) return Limits{{}, after};
  if (comparison == greater) return Limits{after, {}};
  if (comparison == greater_equal) return Limits{limit, {}};
  if (comparison == equal) return Limits{limit, after};
  return {};
}

bool is_name(const FormulaNode& node, std::initializer_list<FormulaName> names) {
  return node.kind == Kind::name && std::find(names.begin(), names.end(), node.name) != names.end();
}

// A comparison with the key, or with its distance from the row or its position, which cannot wrap.
std::optional<Limits> limits_of_comparison(const FormulaNode& node, FormulaWriter& writer) {
  const FormulaNode &left = node.operands[0], &right = node.operands[1];
  if (varies(right))
    return varies(left) ? std::nullopt
                        : limits_of_comparison({.kind = Kind::operation,
                                                .type = FormulaType::boolean,
                                                .operation = mirrored(node.operation),
                                                .operands = {right, left}},
                                               writer);
  if (is_name(left, {FormulaName::key})) return limits_of(node.operation, writer.value(right));
  if (left.kind != Kind::operation || left.operation != subtract) return {};
  const FormulaNode &from = left.operands[0], &subtracted = left.operands[1];
  const auto places = {FormulaName::row, FormulaName::position};
  if (is_name(from, places) && is_name(subtracted, {FormulaName::key}))
    return limits_of(mirrored(node.operation),
                     "bounded_difference(" + writer.value(from) + ", " + writer.value(right) + ")");
  if (is_name(from, {FormulaName::key}) && is_name(subtracted, places))
    return limits_of(node.operation,
                     "bounded_sum(" + writer.value(subtracted) + ", " + writer.value(right) + ")");
  return {};
}

}  // namespace

std::optional<Limits> limits_of(const FormulaNode& node, FormulaWriter& writer) {
  if (node.kind != Kind::operation || node.type != FormulaType::boolean || reads(node, FormulaName::head) ||
      reads(node, FormulaName::head_kv))
    return {};
  if (node.operation == both || node.operation == either) {
    const auto a = limits_of(node.operands[0], writer), b = limits_of(node.operands[1], writer);
    if (!a || !b) return {};
    if (node.operation == both)
      return Limits{call("maximum", a->begin, b->begin), call("minimum", a->end, b->end)};
    if (a->begin.empty() && b->begin.empty()) return Limits{{}, call("maximum", a->end, b->end)};
    if (a->end.empty() && b->end.empty()) return Limits{call("minimum", a->begin, b->begin), {}};
    return {};
  }
  const bool compares = node.operation >= less && node.operation <= equal;
  if (!compares || node.operands[0].type != FormulaType::integer) return {};
  return limits_of_comparison(node, writer);
}

std::optional<Cap> cap_of(const FormulaNode& node) {
  const auto is = [](const FormulaNode& of, FormulaOperation name) {
    return of.kind == Kind::operation && of.operation == name;
  };
  if (!is(node, multiply)) return {};
  const FormulaNode &cap = node.operands[0], &function = node.operands[1];
  if (!is(function, tanh) || !is(function.operands[0], divide)) return {};
  const FormulaNode& divisor = function.operands[0].operands[1];
  if (cap.kind != divisor.kind) return {};
  const bool of_score = is_name(function.operands[0].operands[0], {FormulaName::score});
  if (cap.kind == Kind::real && cap.real == divisor.real && cap.real > 0) return Cap{cap, function, of_score};
  if (cap.kind != Kind::scalar || cap.declared != divisor.declared) return {};
  Cap magnitudes = {
      {.kind = Kind::operation, .type = FormulaType::real, .operation = absolute, .operands = {cap}},
      function,
      of_score};
  magnitudes.before_cap.operands[0].operands[1] = magnitudes.cap;
  return magnitudes;
}

std::optional<Tilt> tilt_of(const FormulaNode& node) {
  const auto is = [](const FormulaNode& of, FormulaOperation name) {
    return of.kind == Kind::operation && of.operation == name;
  };
  if (!is(node, add) && !is(node, subtract)) return {};
  const bool score_first = is_name(node.operands[0], {FormulaName::score});
  const FormulaNode &score = node.operands[score_first ? 0 : 1],
                    &product = node.operands[score_first ? 1 : 0];
  if (!is_name(score, {FormulaName::score}) || (is(node, subtract) && !score_first) || !is(product, multiply))
    return {};
  const bool tilt_first = !varies(product.operands[0]);
  const FormulaNode &tilt = product.operands[tilt_first ? 0 : 1],
                    &distance = product.operands[tilt_first ? 1 : 0];
  if (varies(tilt)) return {};
  // abs and the conversion to a real may come in either order.
  const FormulaNode* difference = &distance;
  bool magnitude = false;
  while (is(*difference, to_real) || is(*difference, absolute)) {
    magnitude |= is(*difference, absolute);
    difference = &difference->operands[0];
  }
  if (!is(*difference, subtract)) return {};
  const FormulaNode &left = difference->operands[0], &right = difference->operands[1];
  const auto places = {FormulaName::row, FormulaName::position};
  if (is_name(left, {FormulaName::key}) && is_name(right, places))
    return Tilt{tilt, right, is(node, subtract), magnitude};
  if (is_name(left, places) && is_name(right, {FormulaName::key}))
    return Tilt{tilt, left, is(node, subtract) == magnitude, magnitude};
  return {};
}

}  // namespace flashjit
