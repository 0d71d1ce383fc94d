// Formulas that have a name: "alibi" in `score` stands for a formula and the declaration of its table.
#pragma once

#include <span>
#include <string_view>

#include "spec.hpp"

namespace flashjit {

inline constexpr std::string_view builtin_scores[] = {"softcap", "alibi", "bias"};
inline constexpr std::string_view builtin_masks[] = {"prefix_lm"};
inline constexpr std::string_view neighbourhood_fields[] = {"kind", "shape", "window", "dilation"};

// Puts formulas in the place of names, and declares their tables and scalars unless the spec does. Throws
// invalid_spec for a name that is none.
void write_out_names(AttentionSpec& spec);

}  // namespace flashjit
