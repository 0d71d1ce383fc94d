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

}  // namespace flashjit
