// Memory budgets that the host (to refuse what cannot fit, to size launches) and device code (to lay it out) share.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Dynamic shared memory of one block of the sm_80 forward, bytes: Q, then num_stages buffers of K and of V.
constexpr int cuda_forward_shared_memory(int head_dim, int head_dim_v, int block_m, int block_n, int num_stages) {
  return 2 * (block_m * head_dim + num_stages * block_n * (head_dim + head_dim_v));
}

// Scratch that a CPU worker lends to the forward, bytes, 64-byte aligned.
constexpr int cpu_forward_scratch(int head_dim, int head_dim_v, int block_m, int block_n) {
  return 4 * (block_m * (head_dim + head_dim_v + 2) + block_n * (head_dim + head_dim_v + block_m));
}

}  // namespace flashjit::device
