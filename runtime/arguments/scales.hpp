// Scales of an 8-bit KV cache: checked and made into params.
#pragma once

#include <optional>

#include "runtime/arguments/formulas.hpp"
#include "templates/shared/kv_scale_params.h"

namespace flashjit {

struct CheckedKvScales {
  device::KvScales k, v;
};

// Nothing without kv_dtype. k and v have been checked. Throws invalid_argument. Reads the scales of a tensor
// or of heads in the host's memory, which must be finite; no others.
std::optional<CheckedKvScales> check_kv_scales(const AttentionSpec& spec, Device device,
                                               const AttentionArgs& args);

// Makes a step's params of type Own, Quantised and WithFormulas if there are scales and formulas.
template <class Own, class Base>
Own& make_params(StepLaunch& step, const Base& base, const std::optional<device::FormulaParams>& formulas,
                 const std::optional<CheckedKvScales>& scales) {
  if (!scales) return make_params<Own>(step, base, formulas);
  auto& made = make_params<device::Quantised<Own>>(step, base, formulas);
  made.k_scale = scales->k;
  made.v_scale = scales->v;
  return made;
}

}  // namespace flashjit
