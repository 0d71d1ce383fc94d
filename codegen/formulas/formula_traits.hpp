// Properties of a formula and of a spec's formulas, for rendering, families and the runtime.
#pragma once

#include <algorithm>

#include "codegen/formulas/formula.hpp"
#include "codegen/spec/mask.hpp"

namespace flashjit {

// Whether a node of the formula passes the test.
template <class Test>
bool any(const FormulaNode& formula, const Test& test) {
  return test(formula) || std::any_of(formula.operands.begin(), formula.operands.end(),
                                      [&](const FormulaNode& operand) { return any(operand, test); });
}
bool reads(const FormulaNode& formula, FormulaName name);
bool reads_row(const FormulaNode& formula);
// Whether it differs between the keys of a row.
bool varies(const FormulaNode& formula);
// Or between rows.
bool varies_with_rows(const FormulaNode& formula);
// Whether computing it once for a row is worth a register.
bool is_costly(const FormulaNode& formula);

// Whether a formula of the spec's masks or scores reads the name.
bool formulas_read(const AttentionSpec& spec, FormulaName name);

// Whether the spec has formulas or sink logits: its kernel takes WithFormulas params.
bool reads_formula_params(const AttentionSpec& spec);

// Whether its launches write gradients of tables or sink logits: its kernel takes WithGradients params.
bool has_gradients(const AttentionSpec& spec);

// Whether a mask's formula only compares keys with what no key changes, so that each row keeps an interval of
// keys (templates/shared/formula_interval.h).
bool is_interval(const FormulaMask& mask, const AttentionSpec& spec);
// Whether a formula of the masks is none, so that its elements are tested one by one.
bool masks_are_tested(const AttentionSpec& spec);
// Whether a backward changes gradients by derivatives of scores, or adds them to elements of tables.
bool has_derivatives(const AttentionSpec& spec);
// Whether a formula of the masks differs between the query heads of a key/value head.
bool masks_read_head(const AttentionSpec& spec);
// Whether a formula of the masks differs between query heads at all.
bool masks_differ_by_head(const AttentionSpec& spec);
// Whether a formula of the masks reads a table, so that only the device knows how much work a tile has.
bool masks_read_tables(const AttentionSpec& spec);
// Whether a formula of the masks compares a key with its row's place: later rows may see more keys.
bool masks_have_diagonal(const AttentionSpec& spec);
// The costly work of formulas for each key of a row, beside arithmetic.
struct FormulaWork {
  bool functions = false;  // exponentials, quotients and the like, in scores
  bool loads = false;      // elements of tables
};
FormulaWork work_of_formulas(const AttentionSpec& spec);

}  // namespace flashjit
