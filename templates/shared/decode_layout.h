// Scratch of decode on a CPU: the host lends it, the kernel lays it out.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Query rows whose scores are computed at a time.
constexpr int decode_rows_at_once = 4;
// Floats of block_m rows' state: O, sums, maxima. block_m is a multiple of decode_rows_at_once.
FLASHJIT_FN constexpr int cpu_decode_state(int head_dim_v, int block_m) {
  return block_m * (round_up(head_dim_v, 32) + 16) + round_up(block_m, 16);
}
// Bytes of scratch of one thread: Q and scores of block_m rows; their state, with batch_invariant twice;
// pointers to the rows of K and V of two blocks, and if they are 8-bit to their scales. block_n is a multiple
// of 16.
FLASHJIT_FN constexpr int cpu_decode_scratch(int head_dim, int head_dim_v, int block_m, int block_n,
                                             bool batch_invariant, bool quantised) {
  return 4 * (block_m * (round_up(head_dim, 32) + block_n) +
              (batch_invariant ? 2 : 1) * cpu_decode_state(head_dim_v, block_m)) +
         4 * 8 * block_n * (quantised ? 2 : 1);
}

}  // namespace flashjit::device
