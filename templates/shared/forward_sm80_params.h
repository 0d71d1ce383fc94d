// Parameters of the sm_80 family's forward.
#pragma once

#include "shared/forward_params.h"

namespace flashjit::device {

struct Sm80ForwardParams : ForwardParams {
  int section_heads;  // heads whose tiles are worked on together
};

}  // namespace flashjit::device
