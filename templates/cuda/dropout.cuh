// Dropout on fragments. A thread holds the words of its rows in registers; those of a block's columns lie in
// shared memory, in the order in which fragments take them: of every 16 columns lane l has 2 (l % 4) + {0, 1,
// 8, 9}, which are 16 bytes.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/dropout.h"

namespace flashjit::device {

// By four columns a thread: 4 * part ... of the block whose keys start at `first_key`.
FLASHJIT_FN void st_column_words(u32 to, int part, const Words& w) {
  const u32 pair = to + part / 4 * 64 + part % 2 * 32 + part / 2 % 2 * 8;
  st_shared_v2(pair, w.x[0], w.x[1]);
  st_shared_v2(pair + 16, w.x[2], w.x[3]);
}
// Columns 16 * step + 2 (lane % 4) + {0, 1, 8, 9}.
FLASHJIT_FN void ld_column_words(u32 (&words)[4], u32 from, int step, u32 lane) {
  ld_shared_v4(words, from + step * 64 + lane % 4 * 16);
}

// Of the row that lane `from` made words of.
FLASHJIT_FN RowWords row_words_of(const RowWords& words, u32 from) {
  return {__shfl_sync(0xffffffffu, words.multiplier, from), __shfl_sync(0xffffffffu, words.addend, from)};
}

}  // namespace flashjit::device
