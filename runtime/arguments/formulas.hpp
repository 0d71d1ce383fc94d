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

// The gradients that a launch writes, of arguments that check_formula_arguments() has checked; absent if
// kernels of the spec write none. Their sums in the workspace are not set.
std::optional<device::GradientParams> check_gradient_arguments(const AttentionSpec& spec, Device device,
                                                               const AttentionArgs& args);

// The params that formulas add to those of a backward.
struct FormulaArguments {
  std::optional<device::FormulaParams> formulas{};
  std::optional<device::GradientParams> gradients{};
};
template <class Own, class Base>
Own& make_params(StepLaunch& step, const Base& base, const FormulaArguments& given);
template <class Own, class Second>
Second& make_second(StepLaunch& step, const FormulaArguments& given);

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

template <class Own, class Base>
Own& make_params(StepLaunch& step, const Base& base, const FormulaArguments& given) {
  if (!given.gradients) return make_params<Own>(step, base, given.formulas);
  auto& made = step.make_params<device::WithGradients<Own>>(base);
  made.formulas = *given.formulas;
  made.gradients = *given.gradients;
  return made;
}
template <class Own, class Second>
Second& make_second(StepLaunch& step, const FormulaArguments& given) {
  return given.gradients ? step.make_second<device::WithGradients<Own>, Second>()
                         : make_second<Own, Second>(step, given.formulas.has_value());
}

}  // namespace flashjit
