// Tables, scalars and sink logits of a launch, checked and made into params.
#pragma once

#include <optional>

#include "runtime/flashjit.hpp"
#include "templates/shared/formula_params.h"
#include "templates/shared/params.h"

namespace flashjit {

// The params, of arguments whose presence was checked; absent if kernels of the spec take none. `problem` and
// `scale` are those that check_attention() made. Touches no tensor memory. Throws invalid_argument naming the
// argument.
std::optional<device::FormulaParams> check_formula_arguments(const AttentionSpec& spec, Device device,
                                                             const AttentionArgs& args,
                                                             const device::ProblemParams& problem,
                                                             float scale);

// The gradients that a launch writes, of arguments that check_formula_arguments() has checked; absent if
// kernels of the spec write none. Their sums in the workspace are not set.
std::optional<device::GradientParams> check_gradient_arguments(const AttentionSpec& spec, Device device,
                                                               const AttentionArgs& args);

// The params that formulas add to those of a backward.
struct FormulaArguments {
  std::optional<device::FormulaParams> formulas{};
  std::optional<device::GradientParams> gradients{};
};
}  // namespace flashjit
