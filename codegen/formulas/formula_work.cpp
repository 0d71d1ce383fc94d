#include "codegen/formulas/formula_work.hpp"

namespace flashjit {
namespace {

using enum FormulaOperation;

std::size_t work_of_operation(const FormulaNode& node, FormulaUse use, bool precise) {
  const auto by_number = [&] { return node.operands[1].kind == FormulaNode::Kind::integer; };
  const std::size_t plain = use == FormulaUse::mask ? 4 : 1;
  const bool exact = use == FormulaUse::mask || precise;
  switch (node.operation) {
    case to_real:  // which the parser adds
      return 0;
    case exp:
    case log:
    case tanh:
    case sqrt:
      return exact ? 64 : 16;
    case divide:
    case remainder:
      if (node.type == FormulaType::real) return exact ? 64 : 16;
      return by_number() ? plain : 128;
    default:
      return plain;
  }
}

}  // namespace

std::size_t work_of(const FormulaNode& node, FormulaUse use, bool precise) {
  const std::size_t read = use == FormulaUse::mask ? 64 : 16;
  std::size_t work = node.kind == FormulaNode::Kind::table       ? read
                     : node.kind == FormulaNode::Kind::operation ? work_of_operation(node, use, precise)
                                                                 : 0;
  for (const FormulaNode& operand : node.operands) work += work_of(operand, use, precise);
  return work;
}

}  // namespace flashjit
