#include "codegen/formulas/formula_writer.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit {

namespace {

using Kind = FormulaNode::Kind;

// The largest magnitude of an integer if positions and lengths are below 2^29; larger than 2^30: unknown.
std::int64_t magnitude(const FormulaNode& node) {
  constexpr std::int64_t of_names = 1 << 29, unknown = std::int64_t{1} << 40;
  if (node.kind == Kind::integer) return std::abs(std::int64_t{node.integer});
  if (node.kind == Kind::name) return node.name == FormulaName::key ? 1 : of_names;
  if (node.kind != Kind::operation) return unknown;
  if (node.operation == FormulaOperation::add || node.operation == FormulaOperation::subtract)
    return std::min(magnitude(node.operands[0]) + magnitude(node.operands[1]), unknown);
  return node.operation == FormulaOperation::negate ? magnitude(node.operands[0]) : unknown;
}
// Whether the difference of its values at neighbouring keys is theirs, so that a kernel may convert one of
// them to float32 and add the distance: nothing wraps in between.
bool is_distance(const FormulaNode& node) {
  return magnitude(node) <= (std::int64_t{1} << 30);
}

std::string real_literal(double value) {
  if (std::isinf(value)) return value > 0 ? "infinity" : "minus_infinity";
  char digits[32];
  std::string text(digits, std::to_chars(digits, digits + sizeof digits, static_cast<float>(value)).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text + "f";
}

struct BinaryText {
  FormulaOperation operation;
  const char* symbol;
  int precedence;
};
using enum FormulaOperation;
constexpr BinaryText binary_texts[] = {
    {either, "||", 1},   {both, "&&", 2},       {equal, "==", 3},   {not_equal, "!=", 3},
    {less, "<", 4},      {less_equal, "<=", 4}, {greater, ">", 4},  {greater_equal, ">=", 4},
    {add, "+", 5},       {subtract, "-", 5},    {multiply, "*", 6}, {divide, "/", 6},
    {remainder, "%", 6},
};
constexpr int unary_precedence = 7, primary = 8;

const char* name_text(FormulaName name) {
  switch (name) {
    case FormulaName::score:
      return "score";
    case FormulaName::row:
      return "row";
    case FormulaName::key:
      return "key";
    case FormulaName::position:
      return "position";
    case FormulaName::head:
      return "head";
    case FormulaName::head_kv:
      return "head_kv";
    case FormulaName::batch:
      return "batch";
    case FormulaName::seqlen_q:
      return "seqlen_q";
    case FormulaName::seqlen_k:
      break;
  }
  return "seqlen_k";
}

bool is(const FormulaNode& node, FormulaOperation operation) {
  return node.kind == Kind::operation && node.operation == operation;
}

}  // namespace

std::string FormulaWriter::call(const std::string& function, const FormulaNode& node) {
  std::string text = function + "(";
  for (std::size_t i = 0; i < node.operands.size(); ++i)
    text += (i == 0 ? "" : ", ") + write(node.operands[i]).text;
  return text + ")";
}

bool FormulaWriter::changes(const FormulaNode& node) const {
  if (ahead_ == Ahead::key) return reads(node, FormulaName::score) || reads_row(node);
  return ahead_ == Ahead::row ? varies(node) : varies_with_rows(node);
}

bool FormulaWriter::stands_for_many(const FormulaNode& node) const {
  return ahead_ == Ahead::key ? varies_with_rows(node) : varies(node);
}

bool FormulaWriter::kept(const std::string& text, Text& place) {
  const auto found = std::find(values_.begin(), values_.end(), text);
  const std::size_t index = static_cast<std::size_t>(found - values_.begin());
  if (found == values_.end()) {
    if (values_.size() == most_values) return false;
    values_.push_back(text);
  }
  const char* const of = ahead_ == Ahead::row ? "row." : ahead_ == Ahead::key ? "of_key." : "tile.";
  place = {std::string(of) + static_cast<char>('a' + index), primary};
  return true;
}

FormulaWriter::Text FormulaWriter::write(const FormulaNode& node) {
  if (!in_ahead_ && !changes(node) && is_costly(node)) {
    in_ahead_ = true;
    const Text whole = write_bare(node);
    in_ahead_ = false;
    Text place;
    return kept(whole.text, place) ? place : whole;
  }
  return write_bare(node);
}

FormulaWriter::Text FormulaWriter::write_bare(const FormulaNode& node) {
  switch (node.kind) {
    case Kind::integer:
      if (node.integer == INT32_MIN) return {"Integer(lowest_int)", primary};
      return {"Integer(" + std::to_string(node.integer) + ")", primary};
    case Kind::real:
      return {"Real(" + real_literal(node.real) + ")", primary};
    case Kind::name:
      return {std::string("at.") + name_text(node.name), primary};
    case Kind::scalar:
      return {"at.read(scalar_" + spec_.scalars[static_cast<std::size_t>(node.declared)].name + "())",
              primary};
    case Kind::table: {
      std::string text = "at.read(table_" + spec_.tables[static_cast<std::size_t>(node.declared)].name + "()";
      for (const FormulaNode& index : node.operands) text += ", " + write(index).text;
      return {text + ")", primary};
    }
    case Kind::operation:
      break;
  }
  return write_operation(node);
}

FormulaWriter::Text FormulaWriter::write_operation(const FormulaNode& node) {
  const FormulaNode& first = node.operands.front();
  if (is_score() && node.type == FormulaType::real) {
    if (node.operation == divide) return write_quotient(first, node.operands[1]);
    if (node.operation == add && is(node.operands[1], multiply)) return fma(node.operands[1], "", first, "");
    if (node.operation == add && is(first, multiply)) return fma(first, "", node.operands[1], "");
    if (node.operation == subtract && is(node.operands[1], multiply))
      return fma(node.operands[1], "-", first, "");
    if (node.operation == subtract && is(first, multiply)) return fma(first, "", node.operands[1], "-");
  }
  for (const BinaryText& op : binary_texts) {
    if (op.operation != node.operation) continue;
    // Compilers warn of && inside || without brackets.
    const int left = op.operation == either ? 3 : op.precedence;
    return {bracketed(write(first), left) + " " + op.symbol + " " +
                bracketed(write(node.operands[1]), op.precedence + 1),
            op.precedence};
  }
  switch (node.operation) {
    case negate:
      return {"-" + bracketed(write(first), primary), unary_precedence};
    case invert:
      return {"!" + bracketed(write(first), primary), unary_precedence};
    case to_real:
      return {real_of(first), primary};
    case absolute:
      return {call("abs", node), primary};
    case floor:
      return {call("floor", node), primary};
    case minimum:
      return {call("minimum", node), primary};
    case maximum:
      return {call("maximum", node), primary};
    case select:
      return {call("select", node), primary};
    default:
      break;
  }
  const char* const name = node.operation == exp    ? "exp"
                           : node.operation == log  ? "log"
                           : node.operation == tanh ? "tanh"
                                                    : "sqrt";
  const bool fast = is_score() && !spec_.precise;
  return {call(fast ? name : std::string("precise_") + name, node), primary};
}

std::string FormulaWriter::real_of(const FormulaNode& node) {
  if (is_score() && is(node, absolute) && is_distance(node.operands[0]))
    return "abs(to_real(" + write(node.operands[0]).text + "))";
  if (!is_score() || is_distance(node) || !stands_for_many(node)) return "to_real(" + write(node).text + ")";
  return "to_real(whole(" + write(node).text + "))";
}

FormulaWriter::Text FormulaWriter::fma(const FormulaNode& product, const char* sign, const FormulaNode& other,
                                       const char* other_sign) {
  const auto signed_text = [&](const char* s, const FormulaNode& node) {
    return *s ? s + bracketed(write(node), primary) : write(node).text;
  };
  return {"fma(" + signed_text(sign, product.operands[0]) + ", " + write(product.operands[1]).text + ", " +
              signed_text(other_sign, other) + ")",
          primary};
}

FormulaWriter::Text FormulaWriter::write_quotient(const FormulaNode& dividend, const FormulaNode& divisor) {
  Text inverse;
  if (divisor.kind == Kind::real && std::isnormal(static_cast<float>(1 / divisor.real))) {
    inverse = {"Real(" + real_literal(1 / divisor.real) + ")", primary};
  } else if (!(ahead_ == Ahead::key ? changes(divisor) : varies(divisor)) && !in_ahead_) {
    in_ahead_ = true;
    const std::string text = "inverse(" + write_bare(divisor).text + ")";
    in_ahead_ = false;
    if (!kept(text, inverse)) inverse = {text, primary};
  } else {
    return {"quotient(" + write(dividend).text + ", " + write(divisor).text + ")", primary};
  }
  return {bracketed(write(dividend), 6) + " * " + inverse.text, 6};
}

}  // namespace flashjit
