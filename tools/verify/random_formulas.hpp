// Seeded formulas, for tests of all that reads them.
#pragma once

#include <cstdint>
#include <string>

#include "codegen/formulas/formula.hpp"
#include "tools/verify/draw.hpp"

namespace flashjit::verify {

// Tables of every dtype and some scalars, for formulas; a spec that is to have total_k packs its keys.
void declare_names(AttentionSpec& spec);

// A formula that reads them. Masks have no exp, log, tanh and sqrt, whose last bit decides comparisons and is
// each target's own.
std::string random_formula(Draw& draw, FormulaUse use, const AttentionSpec& declarations);

// Leaves out what no formula reads.
void drop_unread_names(AttentionSpec& spec);

}  // namespace flashjit::verify
