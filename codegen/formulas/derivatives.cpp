#include "codegen/formulas/derivatives.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "codegen/formulas/formula_work.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {
namespace {

using NodeKind = FormulaNode::Kind;
using Op = FormulaOperation;

FormulaNode number(double value) {
  return {.kind = NodeKind::real, .type = FormulaType::real, .real = value};
}
template <class... Operands>
FormulaNode made(FormulaType type, Op op, Operands... operands) {
  FormulaNode node{.kind = NodeKind::operation, .type = type, .operation = op};
  (node.operands.push_back(std::move(operands)), ...);
  return node;
}
template <class... Operands>
FormulaNode real(Op op, Operands... operands) {
  return made(FormulaType::real, op, std::move(operands)...);
}
template <class... Operands>
FormulaNode condition(Op op, Operands... operands) {
  return made(FormulaType::boolean, op, std::move(operands)...);
}

FormulaNode negative(FormulaNode a) {
  if (a.kind == NodeKind::real) return number(-a.real);
  if (a.kind == NodeKind::operation && a.operation == Op::negate) return std::move(a.operands.front());
  return real(Op::negate, std::move(a));
}
FormulaNode product(FormulaNode a, FormulaNode b) {
  if (is_constant(a, 1)) return b;
  if (is_constant(b, 1)) return a;
  if (is_constant(a, -1)) return negative(std::move(b));
  if (is_constant(b, -1)) return negative(std::move(a));
  return real(Op::multiply, std::move(a), std::move(b));
}
FormulaNode sum(FormulaNode a, FormulaNode b) {
  if (is_constant(a, 0)) return b;
  if (is_constant(b, 0)) return a;
  return real(Op::add, std::move(a), std::move(b));
}

using Leaf = std::function<bool(const FormulaNode&)>;

// Visits the leaves, each with the product of the derivatives on the way to it.
class Paths {
 public:
  // False: no more leaves.
  using Visit = std::function<bool(const FormulaNode& leaf, FormulaNode derivative)>;
  Paths(const Leaf& is_leaf, const Visit& visit) : is_leaf_(is_leaf), visit_(visit) {}

  void walk(const FormulaNode& node, const FormulaNode& so_far) {
    if (done_) return;
    if (is_leaf_(node)) {
      // Outermost, so that a value that is not chosen does not matter, whatever its derivative is.
      FormulaNode derivative = so_far;
      for (const auto& [choice, wanted] : choices_) {
        FormulaNode zero = number(0);
        derivative = wanted ? real(Op::select, choice, std::move(derivative), std::move(zero))
                            : real(Op::select, choice, std::move(zero), std::move(derivative));
      }
      done_ = !visit_(node, std::move(derivative));
      return;
    }
    if (node.kind != NodeKind::operation || node.type != FormulaType::real || !has_leaf(node)) return;
    const FormulaNode& a = node.operands.front();
    switch (node.operation) {
      case Op::negate:
        return walk(a, negative(so_far));
      case Op::absolute: {
        FormulaNode sign = real(Op::select, condition(Op::less, a, number(0)), number(-1),
                                real(Op::select, condition(Op::greater, a, number(0)), number(1), number(0)));
        return walk(a, product(so_far, std::move(sign)));
      }
      case Op::exp:
        return walk(a, product(so_far, node));
      case Op::log:
        return walk(a, real(Op::divide, so_far, a));
      case Op::tanh:
        return walk(a, product(so_far, real(Op::subtract, number(1), product(node, node))));
      case Op::sqrt:
        return choose(condition(Op::greater, a, number(0)), true, a,
                      real(Op::divide, product(so_far, number(0.5)), node));
      case Op::select:
        choose(a, true, node.operands[1], so_far);
        return choose(a, false, node.operands[2], so_far);
      default:
        break;
    }
    if (node.operands.size() < 2) return;  // of an integer
    const FormulaNode& b = node.operands[1];
    switch (node.operation) {
      case Op::add:
        walk(a, so_far);
        return walk(b, so_far);
      case Op::subtract:
        walk(a, so_far);
        return walk(b, negative(so_far));
      case Op::multiply:
        walk(a, product(so_far, b));
        return walk(b, product(so_far, a));
      case Op::divide:
        walk(a, real(Op::divide, so_far, b));
        return walk(b, negative(real(Op::divide, product(so_far, node), b)));
      case Op::minimum:
      case Op::maximum: {
        // A NaN gives the other operand.
        const FormulaNode second =
            condition(Op::either, condition(Op::not_equal, a, a),
                      node.operation == Op::minimum ? condition(Op::less, b, a) : condition(Op::less, a, b));
        choose(second, false, a, so_far);
        return choose(second, true, b, so_far);
      }
      default:
        return;
    }
  }

 private:
  bool has_leaf(const FormulaNode& node) const {
    return is_leaf_(node) || std::any_of(node.operands.begin(), node.operands.end(),
                                         [&](const FormulaNode& operand) { return has_leaf(operand); });
  }
  void choose(FormulaNode choice, bool wanted, const FormulaNode& node, const FormulaNode& so_far) {
    if (!has_leaf(node)) return;
    choices_.emplace_back(std::move(choice), wanted);
    walk(node, so_far);
    choices_.pop_back();
  }

  const Leaf& is_leaf_;
  const Visit& visit_;
  bool done_ = false;
  std::vector<std::pair<FormulaNode, bool>> choices_;
};

bool same(const FormulaNode& a, const FormulaNode& b) {
  return a.kind == b.kind && a.type == b.type && a.integer == b.integer && a.real == b.real &&
         a.name == b.name && a.declared == b.declared && a.operation == b.operation &&
         std::equal(a.operands.begin(), a.operands.end(), b.operands.begin(), b.operands.end(), same);
}

bool is_score(const FormulaNode& node) {
  return node.kind == NodeKind::name && node.name == FormulaName::score;
}
Leaf is_learned(const AttentionSpec& declared) {
  return [&declared](const FormulaNode& node) {
    return node.kind == NodeKind::table && declared.tables[static_cast<std::size_t>(node.declared)].grad;
  };
}

}  // namespace

bool is_constant(const FormulaNode& formula, double value) {
  return formula.kind == NodeKind::real && formula.real == value;
}

FormulaNode derivative_by_score(const FormulaNode& formula) {
  FormulaNode derivative = number(0);
  const Leaf leaf = is_score;
  const Paths::Visit add = [&](const FormulaNode&, FormulaNode path) {
    derivative = sum(std::move(derivative), std::move(path));
    return true;
  };
  Paths(leaf, add).walk(formula, number(1));
  return derivative;
}

std::vector<ElementDerivative> derivatives_by_elements(const FormulaNode& formula,
                                                       const AttentionSpec& declared) {
  std::vector<ElementDerivative> all;
  const Leaf leaf = is_learned(declared);
  const Paths::Visit add = [&](const FormulaNode& read, FormulaNode path) {
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const auto& one) { return same(one.read, read); });
    if (found == all.end())
      all.push_back({read, std::move(path)});
    else
      found->derivative = sum(std::move(found->derivative), std::move(path));
    return true;
  };
  Paths(leaf, add).walk(formula, number(1));
  return all;
}

std::size_t work_of_derivatives(const FormulaNode& formula, const AttentionSpec& declared, std::size_t most) {
  std::size_t work = 0;
  const Leaf of_element = is_learned(declared);
  const Leaf leaf = [&](const FormulaNode& node) { return is_score(node) || of_element(node); };
  const Paths::Visit count = [&](const FormulaNode& read, const FormulaNode& path) {
    // Each is added to a sum or to memory.
    work += 1 + work_of(path, FormulaUse::score, declared.precise);
    for (const FormulaNode& index : read.operands)
      work += work_of(index, FormulaUse::score, declared.precise);
    return work <= most;
  };
  Paths(leaf, count).walk(formula, number(1));
  return work;
}

}  // namespace flashjit
