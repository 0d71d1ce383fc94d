// The second parameter of sm_90a's backward kernels.
#pragma once

#include "shared/tensor_map.h"

namespace flashjit::device {

// 4-D maps, [batch, heads, rows, dim], in boxes of 64 rows of a 64-element panel.
struct BackwardMaps {
  TensorMap q, k, v, d_o;
};

}  // namespace flashjit::device
