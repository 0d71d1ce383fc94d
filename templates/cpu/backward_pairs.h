// Backward by vectors of pairs of bf16 (AVX512_BF16), for bf16.
#pragma once

#include "cpu/backward_bf16.h"

namespace flashjit::device {

struct PairBlockProduct {
  // The same as AmxBlockProduct's. Register tiles of 8 x 2 sums: 10 loads for 16 additions of products.
  __attribute__((noinline)) static void multiply(const bf16* a, i64 a_next, i64 a_step, const bf16* b,
                                                 i64 b_step, u32 terms, float* out, bool add) {
    constexpr int rows = 8, vectors = amx_unit / lanes, row_words = 16, tile_words = 16 * row_words;
    for (int first = 0; first < amx_unit; first += rows, out += rows * amx_unit) {
      const char* const a_rows = reinterpret_cast<const char*>(a) + first / 16 * a_next + first % 16 * 64;
      Rows<vectors> sums[rows] = {};
      if (add) {
#pragma unroll
        for (int i = 0; i < rows; ++i) sums[i] = load_rows<vectors>(out + i * amx_unit);
      }
#pragma nounroll
      for (u32 left = terms; left != 0; left &= left - 1) {
        const int term = __builtin_ctz(left);
        const u32* const x = reinterpret_cast<const u32*>(a_rows + term * a_step);
        const u32* const y = reinterpret_cast<const u32*>(reinterpret_cast<const char*>(b) + term * b_step);
#pragma unroll
        for (int k = 0; k < row_words; ++k) {
          WordVec pairs[vectors];
#pragma unroll
          for (int j = 0; j < vectors; ++j) pairs[j] = load(y + k * row_words + j * tile_words);
#pragma unroll
          for (int i = 0; i < rows; ++i) {
            const WordVec by = x[i * row_words + k] - WordVec{};
#pragma unroll
            for (int j = 0; j < vectors; ++j) sums[i].v[j] = add_products(by, pairs[j], sums[i].v[j]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < rows; ++i) store(out + i * amx_unit, sums[i]);
    }
  }
};

template <class Spec, class Config>
using PairBackward = Bf16Backward<Spec, Config, PairBlockProduct>;

}  // namespace flashjit::device
