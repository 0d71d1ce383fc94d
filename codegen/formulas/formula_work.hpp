// How much work compilers have with formulas, in a unit that all targets share.
#pragma once

#include <cstddef>

#include "codegen/formulas/formula.hpp"

namespace flashjit {

// The most work of a spec's formulas together, with the derivatives of a backward. formulas.md has what the
// costliest specs within it take.
inline constexpr std::size_t most_work = 1024;

// An operation of a score counts 1. One that becomes more instructions counts more: those of masks, which are
// computed on ranges, too; costly ones; exact functions and quotients, as masks and specs with `precise`
// have.
std::size_t work_of(const FormulaNode& formula, FormulaUse use, bool precise);

}  // namespace flashjit
