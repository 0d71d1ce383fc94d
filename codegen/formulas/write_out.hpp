// The formulas of a spec in canonical form.
#pragma once

#include "codegen/spec/spec.hpp"

namespace flashjit {

// Writes out built-in names, checks declarations and formulas, and gives each formula its canonical text.
// Throws invalid_spec.
void write_out_formulas(AttentionSpec& spec);

}  // namespace flashjit
