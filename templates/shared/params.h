// What a launch hands to device code, the same struct for GPU and CPU kernels. Internal: its layout may
// change with any version, since host and device sides are always of the same one (the header's digest is
// part of every key).
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// [batch, row, head, dim], strides in elements, dim contiguous. Packed tensors have batch stride 0.
struct TensorView {
  void* data;
  i64 batch_stride, row_stride, head_stride;
};

struct ForwardParams {
  TensorView q, k, v, o;
  TensorView lse;           // float32; data null where the spec has no lse
  const int* cu_seqlens_q;  // [batch + 1], varlen only
  const int* cu_seqlens_k;  // [batch + 1], varlen only
  int batch;
  int num_heads_q, num_heads_kv;
  int seqlen_q, seqlen_k;  // varlen: the longest that the caller promises
  int total_q, total_k;    // varlen: rows of the packed tensors
  float softmax_scale;     // finite, > 0
};

// A CUtensorMap of the CUDA driver.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// sm_90a: its inputs as the copy engine wants them described; 4-D [batch, heads, rows, dim].
struct ForwardMaps {
  TensorMap q, k, v;
};

}  // namespace flashjit::device
