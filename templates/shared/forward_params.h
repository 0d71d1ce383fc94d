// The forward adds its tensors and the scale to a problem, on every target.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

struct ForwardParams : ProblemParams {
  float scale_log2;  // softmax_scale * log2(e): weights are powers of 2; finite, > 0
  TensorView q, k, v, o;
  TensorView lse;  // float32; data null where the spec has no lse
};

}  // namespace flashjit::device
