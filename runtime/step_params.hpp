// A launch's steps, made by what the kernel's family says of them.
#pragma once

#include <optional>
#include <string_view>

#include "codegen/families/params_type.hpp"
#include "runtime/arguments/scales.hpp"
#include "runtime/executable.hpp"
#include "runtime/operation.hpp"
#include "templates/shared/formula_params.h"
#include "templates/shared/gathered.h"
#include "templates/shared/kv_scale_params.h"
#include "templates/shared/last_keys.h"
#include "templates/shared/offsets.h"
#include "templates/shared/paged_forward_params.h"
#include "templates/shared/rotary.h"

namespace flashjit {

// Adds the kernel's next step, which must be this one. Steps before it get no work: the launch leaves them
// out. Throws internal if the kernel has no such step any more.
StepLaunch& add_step(const PlannedKernel& kernel, Launch& launch, std::string_view function);

// Throws internal where a launch and the kernel's family disagree on a step's params.
[[noreturn]] void refuse_params(const Step& step, const char* what);

// The parts that a spec adds to the params of a step. Null where it adds nothing.
struct AddedParams {
  const device::FormulaParams* formulas = nullptr;
  const device::GradientParams* gradients = nullptr;
  const CheckedKvScales* kv_scales = nullptr;
  const device::OffsetParams* offsets = nullptr;
  const device::GatheredKeys* gathered = nullptr;
};
template <class T>
const T* if_any(const std::optional<T>& given) {
  return given ? &*given : nullptr;
}

namespace step_params {

template <class Params, class Base>
Params& with_offsets(StepLaunch& step, const Base& base, const AddedParams& added) {
  if (step.described->params.offsets != (added.offsets != nullptr)) refuse_params(*step.described, "offsets");
  if (!added.offsets) return step.make_params<Params>(base);
  auto& made = step.make_params<device::WithOffsets<Params>>(base);
  made.position_offsets = *added.offsets;
  return made;
}

template <class Params, class Base>
Params& with_formulas(StepLaunch& step, const Base& base, const AddedParams& added) {
  const ParamsType& type = step.described->params;
  const bool reads = type.formulas != ParamsType::Formulas::none,
             learns = type.formulas == ParamsType::Formulas::gradients;
  if (reads != (added.formulas != nullptr) || learns != (added.gradients != nullptr))
    refuse_params(*step.described, "formulas");
  if (!reads) return with_offsets<Params>(step, base, added);
  if (!learns) {
    auto& made = with_offsets<device::WithFormulas<Params>>(step, base, added);
    made.formulas = *added.formulas;
    return made;
  }
  auto& made = with_offsets<device::WithGradients<Params>>(step, base, added);
  made.formulas = *added.formulas;
  made.gradients = *added.gradients;
  return made;
}

template <class Params, class Base>
Params& with_scales(StepLaunch& step, const Base& base, const AddedParams& added) {
  if (step.described->params.quantised != (added.kv_scales != nullptr))
    refuse_params(*step.described, "scales of keys and values");
  if (!added.kv_scales) return with_formulas<Params>(step, base, added);
  auto& made = with_formulas<device::Quantised<Params>>(step, base, added);
  made.k_scale = added.kv_scales->k;
  made.v_scale = added.kv_scales->v;
  return made;
}

}  // namespace step_params

// Makes a step's params of type Own with what the spec adds, as params_of() of the same types says. The pages
// of a paged one are not set.
template <class Own, bool has_pages = false, class Base>
Own& make_params(StepLaunch& step, const Base& base, const AddedParams& added = {}) {
  const ParamsType& type = step.described->params;
  if (type.own != &id_of_struct<Own> || (type.paged && !has_pages))
    refuse_params(*step.described, "a struct");
  if (type.gathered != (added.gathered != nullptr)) refuse_params(*step.described, "gathered keys");
  if (added.gathered) {
    auto& made = step.make_params<device::WithGathered<Own>>(base);
    made.gathered = *added.gathered;
    return made;
  }
  if constexpr (has_pages)
    if (type.paged) return step_params::with_scales<device::Paged<Own>>(step, base, added);
  return step_params::with_scales<Own>(step, base, added);
}

// Makes a kernel's second parameter.
template <class Second>
Second& make_second(StepLaunch& step) {
  if (step.described->params.second != &id_of_struct<Second>)
    refuse_params(*step.described, "a second struct");
  return step.make_second<Second>();
}

}  // namespace flashjit
