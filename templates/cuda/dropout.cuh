// Dropout on fragments. A thread holds the words of its rows in registers. The words of a block's columns lie
// in shared memory in the order in which fragments hold them: lane l holds columns 2 (l % 4) + {0, 1, 8, 9}
// of every 16, so its words are 16 contiguous bytes.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/dropout.h"

namespace flashjit::device {

// Stores the words of columns 4 * part ... 4 * part + 3 of a block; one thread for each part.
FLASHJIT_FN void st_column_words(u32 to, int part, const Words& w) {
  const u32 pair = to + part / 4 * 64 + part % 2 * 32 + part / 2 % 2 * 8;
  st_shared_v2(pair, w.x[0], w.x[1]);
  st_shared_v2(pair + 16, w.x[2], w.x[3]);
}
// Loads the words of columns 16 * step + 2 (lane % 4) + {0, 1, 8, 9}.
FLASHJIT_FN void ld_column_words(u32 (&words)[4], u32 from, int step, u32 lane) {
  ld_shared_v4(words, from + step * 64 + lane % 4 * 16);
}
// Loads the words of columns 8 * tile + 2 (lane % 4) + {0, 1}.
FLASHJIT_FN void ld_column_words_of_8(u32 (&words)[2], u32 from, u32 tile, u32 lane) {
  int a, b;
  ld_shared_v2(a, b, from + tile / 2 * 64 + tile % 2 * 8 + lane % 4 * 16);
  words[0] = static_cast<u32>(a), words[1] = static_cast<u32>(b);
}

// The words of a row; lane `from` made them.
FLASHJIT_FN RowWords row_words_of(const RowWords& words, u32 from) {
  return {__shfl_sync(0xffffffffu, words.multiplier, from), __shfl_sync(0xffffffffu, words.addend, from)};
}

}  // namespace flashjit::device
