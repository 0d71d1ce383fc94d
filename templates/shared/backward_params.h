// Parameters of the backward on every target: a problem, the tensors and the scale.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// o and lse are those of the forward. With delta = rowsum(do * o) - dlse of each row:
//   P = exp(scale Q K^T - lse)      dV = P^T dO
//   dS = P * (dO V^T - delta)       dQ = scale dS K      dK = scale dS^T Q
// With dropout dV has the kept weights of P, times 1 / (1 - p), and dO V^T is treated in the same way. dk and
// dv are sums over the query heads of a key/value head.
struct BackwardParams : ProblemParams {
  float scale, scale_log2;  // softmax_scale, and the same times log2(e); finite, > 0
  TensorView q, k, v, o, d_o;
  TensorView lse, dlse;  // float32; dlse's data is null if it was not given
  TensorView dq, dk, dv;
};

}  // namespace flashjit::device
