// Parameters of a merge.
#pragma once

#include "shared/tensor_view.h"

namespace flashjit::device {

// Packed tensors are one batch entry.
struct MergeParams {
  TensorView parts_o, parts_lse;         // of the first part
  TensorView o, lse;                     // lse: data is null if the spec has none
  i64 parts_o_stride, parts_lse_stride;  // from one part to the next
  int parts;
  u32 batch, heads;
  int seqlen;
};

// Parameters of a merge on GPUs. A block merges block_heads heads and, if heads are few, block_positions
// positions of the sequence.
struct CudaMergeParams : MergeParams {
  u32 block_heads, block_positions;
  u32 heads_inverse;  // r / block_heads is r * heads_inverse >> 16 for r < 256
};

}  // namespace flashjit::device
