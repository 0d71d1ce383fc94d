// Parameters of the forward of the sm_80 family.
#pragma once

#include "shared/forward_params.h"

namespace flashjit::device {

struct Sm80ForwardParams : ForwardParams {
  int section_heads;  // heads of a section (cuda/tile_order.cuh)
};

}  // namespace flashjit::device
