// Budgets that both the host (to refuse what cannot fit) and device code (to lay out memory) must agree on.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Filled by the kernels: shared memory of a CUDA block, scratch of a CPU worker.

}  // namespace flashjit::device
