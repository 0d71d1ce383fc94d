// Formulas as device text: one functor for each (templates/shared/formula.h).
#pragma once

#include <string>

#include "codegen/formulas/formula.hpp"

namespace flashjit {

// Functors compute some parts once for many elements: for each row those that no key changes; or for each key
// those that no row changes, where a thread has many rows of few keys.
enum class ComputedAhead { row, key };

// The types that functors read tables and scalars by, then the functors Mask1, Mask2, ... of the formulas in
// spec.mask and Score1, ... of those in spec.score. The user's words stand beside each. Scores round as is
// fast on the target, unless the spec says precise; masks round each operation to nearest. Those of a
// backward have their derivatives.
std::string formula_functors(const AttentionSpec& spec, ComputedAhead ahead = ComputedAhead::row);

}  // namespace flashjit
