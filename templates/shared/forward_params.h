// Parameters of the forward on every target: a problem, the tensors and the scale.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

struct ForwardParams : ProblemParams {
  float scale_log2;  // softmax_scale * log2(e), as weights are powers of 2; finite, > 0
  TensorView q, k, v, o;
  TensorView lse;  // float32; data is null if the spec has no lse
};

}  // namespace flashjit::device
