// What a launch of a merge hands to device code.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

// Views are those of one part; packed tensors are one batch entry.
struct MergeParams {
  TensorView parts_o, parts_lse, o;
  TensorView lse;                        // float32; data null where the spec has no lse
  i64 parts_o_stride, parts_lse_stride;  // elements from one part to the next
  int parts, seqlen;
  u32 batch, heads;
};

}  // namespace flashjit::device
