// Tables, scalars and sink logits of a launch, checked and made into params.
#pragma once

#include <optional>

#include "runtime/flashjit.hpp"
#include "templates/shared/formula_params.h"
#include "templates/shared/params.h"

namespace flashjit {

// Whether kernels of the spec take FormulaParams.
bool has_formula_params(const AttentionSpec& spec);

// The params, of arguments whose presence was checked; absent if kernels of the spec take none. `problem` and
// `scale` are those that check_attention() made. Touches no tensor memory. Throws invalid_argument naming the
// argument.
std::optional<device::FormulaParams> check_formula_arguments(const AttentionSpec& spec, Device device,
                                                             const AttentionArgs& args,
                                                             const device::ProblemParams& problem,
                                                             float scale);

}  // namespace flashjit
