// The canonical text of formulas.
#include <charconv>
#include <cmath>

#include "codegen/formulas/formula.hpp"
#include "codegen/formulas/formula_words.hpp"
#include "codegen/spec/declarations.hpp"

namespace flashjit {
namespace {

constexpr int select_precedence = -1;

// The shortest digits that give the same float32.
std::string real_text(double value) {
  if (std::isinf(value)) return "inf";
  char digits[32];
  std::string text(digits, std::to_chars(digits, digits + sizeof digits, static_cast<float>(value)).ptr);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

class Writer {
 public:
  explicit Writer(const AttentionSpec& declared) : declared_(declared) {}

  // Adds the formula, in brackets if it binds weaker than `precedence`.
  void add(const FormulaNode& node, int precedence) {
    const std::size_t begin = text_.size();
    const int own = add_bare(node, precedence);
    if (own >= precedence) return;
    text_.insert(begin, "(");
    text_ += ')';
  }
  std::string take() { return std::move(text_); }

 private:
  // Returns the precedence of the outermost operator.
  int add_bare(const FormulaNode& node, int precedence) {
    switch (node.kind) {
      case FormulaNode::Kind::integer:
        text_ += std::to_string(node.integer);
        break;
      case FormulaNode::Kind::real:
        text_ += real_text(node.real);
        break;
      case FormulaNode::Kind::name:
        for (const Variable& variable : variables)
          if (variable.name == node.name) text_ += variable.text;
        break;
      case FormulaNode::Kind::scalar:
        text_ += declared_.scalars[static_cast<std::size_t>(node.declared)].name;
        break;
      case FormulaNode::Kind::table:
        text_ += declared_.tables[static_cast<std::size_t>(node.declared)].name;
        add_list("[", node, "]");
        break;
      case FormulaNode::Kind::operation:
        return add_operation(node, precedence);
    }
    return unary_precedence;
  }

  void add_list(const char* open, const FormulaNode& node, const char* close) {
    text_ += open;
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      if (i > 0) text_ += ", ";
      add(node.operands[i], select_precedence);
    }
    text_ += close;
  }

  int add_operation(const FormulaNode& node, int precedence) {
    const FormulaNode& first = node.operands.front();
    for (const BinaryOperator& op : binary_operators) {
      if (op.operation != node.operation) continue;
      add(first, op.precedence);
      ((text_ += ' ') += op.symbol) += ' ';
      add(node.operands[1], op.precedence + 1);
      return op.precedence;
    }
    for (const Function& function : functions) {
      if (function.operation != node.operation) continue;
      text_ += function.text;
      add_list("(", node, ")");
      return unary_precedence;
    }
    switch (node.operation) {
      case FormulaOperation::to_real:  // implied
        return add_bare(first, precedence);
      case FormulaOperation::negate:
      case FormulaOperation::invert:
        text_ += node.operation == FormulaOperation::negate ? '-' : '!';
        add(first, unary_precedence);
        return unary_precedence;
      default:
        break;
    }
    add(first, select_precedence + 1);
    text_ += " ? ";
    add(node.operands[1], select_precedence);
    text_ += " : ";
    add(node.operands[2], select_precedence);
    return select_precedence;
  }

  const AttentionSpec& declared_;
  std::string text_;
};

}  // namespace

FormulaType type_of(DType dtype) {
  const bool real = dtype == DType::fp32 || dtype == DType::fp16 || dtype == DType::bf16;
  return real ? FormulaType::real : FormulaType::integer;
}

std::string formula_text(const FormulaNode& formula, const AttentionSpec& declarations) {
  Writer writer(declarations);
  writer.add(formula, select_precedence);
  return writer.take();
}

}  // namespace flashjit
