// A CUtensorMap of the CUDA driver: it describes a tensor to the copy engine (TMA).
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

struct alignas(64) TensorMap {
  u64 opaque[16];
};

}  // namespace flashjit::device
