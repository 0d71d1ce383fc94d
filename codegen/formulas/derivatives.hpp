// Derivatives of formulas of scores, as formulas.
//
// Where a function has no derivative, one is chosen: abs 0 at 0; floor, conditions and integers 0; sqrt 0
// where it is 0; min and max that of the operand that they give, of equal ones the first; ?: that of the
// chosen value.
#pragma once

#include <cstddef>
#include <vector>

#include "codegen/formulas/formula.hpp"

namespace flashjit {

// A constant real is 0.0 or 1.0 where this is known.
FormulaNode derivative_by_score(const FormulaNode& formula);
bool is_constant(const FormulaNode& formula, double value);

// An element of a table with `grad` that a formula reads: the node of kind table, and the derivative by it.
// Reads of the same element are one.
struct ElementDerivative {
  FormulaNode read, derivative;
};
std::vector<ElementDerivative> derivatives_by_elements(const FormulaNode& formula,
                                                       const AttentionSpec& declared);

// The work (formula_work.hpp) of all of them together; if it is more than `most`, any number above that.
// Derivatives of long products grow as their square.
std::size_t work_of_derivatives(const FormulaNode& formula, const AttentionSpec& declared, std::size_t most);

}  // namespace flashjit
