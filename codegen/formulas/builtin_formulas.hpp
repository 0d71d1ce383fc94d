// Formulas that have a name: "alibi" in `score` stands for a formula and the declaration of its table.
#pragma once

#include "codegen/spec/spec.hpp"

namespace flashjit {

// Puts formulas in the place of names, and declares their tables and scalars unless the spec does. Throws
// invalid_spec for a name that is none.
void write_out_names(AttentionSpec& spec);

}  // namespace flashjit
