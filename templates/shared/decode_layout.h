// Scratch of decode on a CPU: the host lends it, the kernel lays it out.
#pragma once

#include "shared/platform.h"

namespace flashjit::device {

// Query rows whose scores are computed at a time.
constexpr int decode_rows_at_once = 4;
// Bytes of scratch of one thread: Q, O, scores and state of block_m rows; pointers to the rows of K and V of
// two blocks. block_m is a multiple of decode_rows_at_once, block_n one of 16.
FLASHJIT_FN constexpr int cpu_decode_scratch(int head_dim, int head_dim_v, int block_m, int block_n) {
  return 4 * (block_m * (round_up(head_dim, 32) + round_up(head_dim_v, 32) + block_n + 16) +
              round_up(block_m, 16)) +
         4 * 8 * block_n;
}

}  // namespace flashjit::device
