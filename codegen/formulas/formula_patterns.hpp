// Formulas that kernels compute in a way of their own: masks whose rows keep an interval of keys, scores with
// a cap, scores that change by the distance of a key.
#pragma once

#include <optional>
#include <string>

#include "codegen/formulas/formula_writer.hpp"

namespace flashjit {

// The keys that a row sees, as text; empty: no limit of that side.
struct Limits {
  std::string begin, end;
};
// The interval of keys that each row keeps, if the mask's formula is one.
std::optional<Limits> limits_of(const FormulaNode& node, FormulaWriter& writer);

// cap * tanh(score / cap), as users write softcaps. The same holds for the magnitude of the cap.
struct Cap {
  FormulaNode cap, before_cap;
  bool of_score;
};
std::optional<Cap> cap_of(const FormulaNode& node);

// score + tilt * distance, with a tilt that no key changes, and the distance of the key from the row or its
// position, or the magnitude of that distance.
struct Tilt {
  FormulaNode tilt, from;
  bool negative, magnitude;
};
std::optional<Tilt> tilt_of(const FormulaNode& node);

}  // namespace flashjit
