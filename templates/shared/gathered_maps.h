// The second parameter of sm_90a's forward with gathered keys.
#pragma once

#include "shared/forward_sm90a_params.h"

namespace flashjit::device {

struct GatheredMaps : ForwardMaps {
  TensorMap k_gathered, v_gathered;
};

}  // namespace flashjit::device
