// Decides which weights dropout drops. The decision depends only on (seed, offset) and on the element's batch
// entry, query head, row and key within its sequence. It is the same on every target, for any tiles and any
// pass.
//
//   row words of (row, head, batch)   a odd, c
//   column word of (key, batch)       b
//   dropped                           a * b + c mod 2^32 < below       below = p * 2^32, rounded
//
// Words come from Philox4x32-10 (Salmon et al., 2011), once for each row and once for each column. An element
// takes one multiply-add and a comparison. The cost does not depend on the order in which a kernel holds
// elements: fragments of mma and wgmma, rows packed over a group of heads (column words do not depend on the
// head), a backward with transposed scores, vectors with rows in their lanes.
//
// Elements of different rows are independent. So are any two elements of a row, except for the power of two
// that divides the difference of their b: a and c are random (Dietzfelbinger, 1996). The scheme is fixed for
// good: tests/unit/dropout_test.cpp has golden vectors.
#pragma once

#include "shared/params.h"

namespace flashjit::device {

struct Words {
  u32 x[4];
};

FLASHJIT_FN void philox_round(u32 (&x)[4], u32& key0, u32& key1) {
  const u64 first = u64{0xd2511f53} * x[0], second = u64{0xcd9e8d57} * x[2];
  x[0] = static_cast<u32>(second >> 32) ^ x[1] ^ key0;
  x[1] = static_cast<u32>(second);
  x[2] = static_cast<u32>(first >> 32) ^ x[3] ^ key1;
  x[3] = static_cast<u32>(first);
  key0 += 0x9e3779b9;
  key1 += 0xbb67ae85;
}
// few_registers: the rounds stay a loop on GPUs.
template <bool few_registers = false>
FLASHJIT_FN Words philox(u32 key0, u32 key1, Words counter) {
  if constexpr (few_registers) {
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int round = 0; round < 10; ++round) philox_round(counter.x, key0, key1);
  } else {
    for (int round = 0; round < 10; ++round) philox_round(counter.x, key0, key1);
  }
  return counter;
}

// The keys of one launch: two words for row words, two for column words.
FLASHJIT_FN Words dropout_key(u64 seed, u64 offset) {
  return philox(static_cast<u32>(seed), static_cast<u32>(seed >> 32),
                {static_cast<u32>(offset), static_cast<u32>(offset >> 32), 0, 0});
}
FLASHJIT_FN Words dropout_key(const DropoutParams& p) {
  return dropout_key(p.seed_at ? *p.seed_at : p.seed, p.offset_at ? *p.offset_at : p.offset);
}

struct RowWords {
  u32 multiplier, addend;
};
template <bool few_registers = false>
FLASHJIT_FN RowWords dropout_row_words(const Words& key, int row, int head_q, int batch) {
  const Words w = philox<few_registers>(
      key.x[0], key.x[1], {static_cast<u32>(row), static_cast<u32>(head_q), static_cast<u32>(batch), 0});
  return {w.x[0] | 1, w.x[1]};
}

// The column words of keys [4 * group, 4 * group + 4).
FLASHJIT_FN Words dropout_column_words(const Words& key, int group, int batch) {
  return philox(key.x[2], key.x[3], {static_cast<u32>(group), 0, static_cast<u32>(batch), 1});
}

// The words of a launch's rows and keys, by their places in the whole. Offsets: the kernel's, as NoOffsets of
// shared/score.h.
template <class Offsets, bool few_registers = false, class Params>
FLASHJIT_FN RowWords row_words_at(const Params& p, const Words& key, int row, int head_q, int batch) {
  return dropout_row_words<few_registers>(key, row + Offsets::of_rows(p, batch), head_q, batch);
}
// Of keys [4 * group, 4 * group + 4).
template <class Offsets, class Params>
FLASHJIT_FN Words column_words_at(const Params& p, const Words& key, int group, int batch) {
  if constexpr (!Offsets::exist) {
    return dropout_column_words(key, group, batch);
  } else {
    const int first = group * 4 + Offsets::of_keys(p, batch), shift = first % 4;
    const Words words = dropout_column_words(key, first / 4, batch);
    if (shift == 0) return words;
    const Words next = dropout_column_words(key, first / 4 + 1, batch);
    u32 x[8] = {words.x[0], words.x[1], words.x[2], words.x[3], next.x[0], next.x[1], next.x[2], next.x[3]};
    // The indices are constants: the words stay in registers.
    if (shift & 1)
      for (int i = 0; i < 7; ++i) x[i] = x[i + 1];
    if (shift & 2)
      for (int i = 0; i < 6; ++i) x[i] = x[i + 2];
    return {x[0], x[1], x[2], x[3]};
  }
}

FLASHJIT_FN bool dropped(const RowWords& row, u32 column, u32 below) {
  return row.multiplier * column + row.addend < below;
}

}  // namespace flashjit::device
