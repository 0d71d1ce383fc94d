// Names that stand for formulas (codegen/formulas/builtin_formulas.cpp).
#pragma once

#include <string_view>

namespace flashjit {

inline constexpr std::string_view builtin_scores[] = {"softcap", "alibi", "bias"};
inline constexpr std::string_view builtin_masks[] = {"prefix_lm"};
inline constexpr std::string_view neighbourhood_fields[] = {"kind", "shape", "window", "dilation"};

}  // namespace flashjit
