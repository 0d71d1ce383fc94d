// Formulas as device text: one functor for each (templates/shared/formula.h).
#pragma once

#include <string>

#include "formula.hpp"

namespace flashjit {

// Whether the spec has formulas or sink logits: its kernel takes WithFormulas params.
bool reads_formula_params(const AttentionSpec& spec);

// Whether its launches write gradients of tables or sink logits: its kernel takes WithGradients params.
bool has_gradients(const AttentionSpec& spec);

// Functors compute some parts once for many elements: for each row those that no key changes; or for each key
// those that no row changes, where a thread has many rows of few keys.
enum class ComputedAhead { row, key };

// The types that functors read tables and scalars by, then the functors Mask1, Mask2, ... of the formulas in
// spec.mask and Score1, ... of those in spec.score. The user's words stand beside each. Scores round as is
// fast on the target, unless the spec says precise; masks round each operation to nearest. Those of a
// backward have their derivatives.
std::string formula_functors(const AttentionSpec& spec, ComputedAhead ahead = ComputedAhead::row);

// Whether a mask's formula only compares keys with what no key changes, so that each row keeps an interval of
// keys (templates/shared/formula_interval.h).
bool is_interval(const FormulaMask& mask, const AttentionSpec& spec);
// Whether a formula of the masks is none, so that its elements are tested one by one.
bool masks_are_tested(const AttentionSpec& spec);
// Whether a backward changes gradients by derivatives of scores, or adds them to elements of tables.
bool has_derivatives(const AttentionSpec& spec);
bool reads(const FormulaNode& formula, FormulaName name);
// Whether a formula of the masks differs between the query heads of a key/value head.
bool masks_read_head(const AttentionSpec& spec);
// Whether a formula of the masks differs between query heads at all.
bool masks_differ_by_head(const AttentionSpec& spec);
// Whether a formula of the masks reads a table, so that only the device knows how much work a tile has.
bool masks_read_tables(const AttentionSpec& spec);
// The costly work of formulas for each key of a row, beside arithmetic.
struct FormulaWork {
  bool functions = false;  // exponentials, quotients and the like, in scores
  bool loads = false;      // elements of tables
};
FormulaWork work_of_formulas(const AttentionSpec& spec);
// Whether a formula of the masks compares a key with its row's place: later rows may see more keys.
bool masks_have_diagonal(const AttentionSpec& spec);

}  // namespace flashjit
