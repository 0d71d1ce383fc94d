// The words and operators of formulas, for their parser and their text.
#pragma once

#include <array>
#include <string_view>

#include "codegen/formulas/formula.hpp"

namespace flashjit {

struct Variable {
  std::string_view text;
  FormulaName name;
  FormulaType type = FormulaType::integer;
};
inline constexpr Variable variables[] = {
    {"score", FormulaName::score, FormulaType::real},
    {"row", FormulaName::row},
    {"key", FormulaName::key},
    {"position", FormulaName::position},
    {"head", FormulaName::head},
    {"head_kv", FormulaName::head_kv},
    {"batch", FormulaName::batch},
    {"seqlen_q", FormulaName::seqlen_q},
    {"seqlen_k", FormulaName::seqlen_k},
};
constexpr const Variable* find_variable(std::string_view text) {
  for (const Variable& variable : variables)
    if (variable.text == text) return &variable;
  return nullptr;
}

struct Function {
  std::string_view text;
  FormulaOperation operation;
  int arity = 1;
  bool takes_reals = true;
};
inline constexpr Function functions[] = {
    {"abs", FormulaOperation::absolute, 1, false},
    {"min", FormulaOperation::minimum, 2, false},
    {"max", FormulaOperation::maximum, 2, false},
    {"exp", FormulaOperation::exp},
    {"log", FormulaOperation::log},
    {"tanh", FormulaOperation::tanh},
    {"sqrt", FormulaOperation::sqrt},
    {"floor", FormulaOperation::floor},
};
inline constexpr auto function_names = [] {
  std::array<std::string_view, std::size(functions)> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = functions[i].text;
  return names;
}();
constexpr const Function* find_function(std::string_view text) {
  for (const Function& function : functions)
    if (function.text == text) return &function;
  return nullptr;
}

// Operators between two operands; all are left-associative. `precedence`: the higher binds the stronger.
struct BinaryOperator {
  std::string_view symbol;
  FormulaOperation operation;
  int precedence;
  constexpr bool compares() const {
    return operation >= FormulaOperation::less && operation <= FormulaOperation::not_equal;
  }
};
inline constexpr BinaryOperator binary_operators[] = {
    {"||", FormulaOperation::either, 0},   {"&&", FormulaOperation::both, 1},
    {"==", FormulaOperation::equal, 2},    {"!=", FormulaOperation::not_equal, 2},
    {"<", FormulaOperation::less, 3},      {"<=", FormulaOperation::less_equal, 3},
    {">", FormulaOperation::greater, 3},   {">=", FormulaOperation::greater_equal, 3},
    {"+", FormulaOperation::add, 4},       {"-", FormulaOperation::subtract, 4},
    {"*", FormulaOperation::multiply, 5},  {"/", FormulaOperation::divide, 5},
    {"%", FormulaOperation::remainder, 5},
};
inline constexpr int unary_precedence = 6;

}  // namespace flashjit
