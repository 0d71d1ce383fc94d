// A CUtensorMap of the CUDA driver: a tensor as the copy engine (TMA) wants it described.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

}  // namespace flashjit::device
