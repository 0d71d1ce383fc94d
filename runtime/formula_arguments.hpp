// Tables, scalars and sink logits of a launch, checked and made into params.
#pragma once

#include <optional>

#include "runtime/executable.hpp"
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

// Makes a step's params of type Own, WithFormulas if there are any.
template <class Own, class Base>
Own& make_params(StepLaunch& step, const Base& base, const std::optional<device::FormulaParams>& formulas) {
  if (!formulas) return step.make_params<Own>(base);
  auto& made = step.make_params<device::WithFormulas<Own>>(base);
  made.formulas = *formulas;
  return made;
}
// And a kernel's second parameter after such params.
template <class Own, class Second>
Second& make_second(StepLaunch& step, bool with_formulas) {
  return with_formulas ? step.make_second<device::WithFormulas<Own>, Second>()
                       : step.make_second<Own, Second>();
}

}  // namespace flashjit
