// Memory budgets that the host (to refuse what cannot fit, to size launches) and device code (to lay it out)
// share.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Dynamic shared memory of one block of the sm_80 forward, bytes: Q, then num_stages buffers of K and of V;
// at the end O in the same place. Rows of Q and K are padded to a multiple of 16 elements.
FLASHJIT_FN constexpr int cuda_forward_shared_memory(int head_dim, int head_dim_v, int block_m, int block_n,
                                                     int num_stages) {
  const int padded = round_up(head_dim, 16);
  const int inputs = block_m * padded + num_stages * block_n * (padded + head_dim_v);
  return 2 * max(inputs, block_m * head_dim_v);
}

// Its registers for scores and output, a thread.
FLASHJIT_FN constexpr int cuda_forward_accumulators(int head_dim_v, int block_m, int block_n, int num_warps) {
  return block_m * (block_n + head_dim_v) / (num_warps * 32);
}

// Query rows that a CPU kernel's register tiles take at a time: a whole number of units for every vector
// length.
constexpr int cpu_unit_rows = 48;

// Floats from one packed row of K or V to the next: rows of a power of two would share cache sets.
FLASHJIT_FN constexpr int cpu_packed_row(int columns) {
  return columns + 16;
}

// Scratch that a CPU worker lends to the forward, bytes, 64-byte aligned: Q, O and two values a row of the
// tile; a block of K and V; a unit's scores and its rescaling.
FLASHJIT_FN constexpr int cpu_forward_scratch(int head_dim, int head_dim_v, int block_m, int block_n) {
  return 4 *
         (round_up(block_m, cpu_unit_rows) * (head_dim + head_dim_v + 2) +
          block_n * (cpu_packed_row(head_dim) + cpu_packed_row(head_dim_v)) + (block_n + 1) * cpu_unit_rows);
}

}  // namespace flashjit::device
