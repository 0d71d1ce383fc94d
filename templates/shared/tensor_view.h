// The address and the strides of a tensor.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// [batch, row, head, dim], strides in elements, dim contiguous. Packed tensors have batch stride 0.
struct TensorView {
  void* data;
  i64 batch_stride, row_stride, head_stride;

  FLASHJIT_FN i64 offset(i64 batch, i64 row, i64 head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
};

}  // namespace flashjit::device
