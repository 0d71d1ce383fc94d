// Parameters that an 8-bit KV cache adds to those of a kernel.
#pragma once

#include "shared/kv_element.h"

namespace flashjit::device {

// Stored values that share a scale.
enum class KvScale { tensor, head, token_head };

// Scales of k or v: of each key and key/value head, of each head, or one; strides are 0 where they are
// shared. With pages, a batch entry is a page and a row a place in it.
struct KvScales {
  const float* data;
  i64 batch_stride, row_stride, head_stride;
  FLASHJIT_FN i64 offset(i64 batch, i64 row, i64 head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

template <class Params>
struct Quantised : Params {
  KvScales k_scale, v_scale;
};

// The parameters of a kernel whose Spec has a kv_dtype.
template <class Params>
FLASHJIT_FN const Quantised<Params>& with_kv_scales(const Params& p) {
  return static_cast<const Quantised<Params>&>(p);
}

}  // namespace flashjit::device
