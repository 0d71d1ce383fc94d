// A few consecutive elements of a row in a thread's registers.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// 2, 4, 8 or 16 bytes, aligned to as many.
template <class Element, int columns>
struct RowPiece {
  static constexpr int bytes = columns * sizeof(Element);
  static_assert(bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16);
  u32 words[(bytes + 3) / 4] = {};

  // For elements that nobody writes while the kernel runs.
  FLASHJIT_FN void load_lasting(const Element* from) {
    if constexpr (bytes == 16)
      ld_global_nc_v4(words, from);
    else
      load_narrow(from);
  }
  // For elements that this thread may overwrite later.
  FLASHJIT_FN void load(const Element* from) {
    if constexpr (bytes == 16)
      ld_global_cg_v4(words, from);
    else
      load_narrow(from);
  }
  FLASHJIT_FN void store(Element* to) const {
    if constexpr (bytes == 16) {
      st_global_v4(to, words);
    } else if constexpr (bytes == 8) {
      st_global_v2(to, words);
    } else if constexpr (bytes == 4) {
      st_global(to, words[0]);
    } else {
      *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(words[0]);
    }
  }

  FLASHJIT_FN float operator[](int c) const {
    if constexpr (sizeof(Element) == 4)
      return __uint_as_float(words[c]);
    else
      return to_float(Element{static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16))});
  }
  // Rounds to nearest even.
  FLASHJIT_FN void set(const float (&x)[columns]) {
    if constexpr (sizeof(Element) == 4) {
#pragma unroll
      for (int c = 0; c < columns; ++c) words[c] = __float_as_uint(x[c]);
    } else {
#pragma unroll
      for (int c = 0; c < columns; c += 2)
        words[c / 2] = cvt_rn_x2(Element{}, x[c], c + 1 < columns ? x[c + 1] : 0);
    }
  }

 private:
  FLASHJIT_FN void load_narrow(const Element* from) {
    if constexpr (bytes == 2) {
      words[0] = *reinterpret_cast<const unsigned short*>(from);
    } else {
      const u32* const at = reinterpret_cast<const u32*>(from);
#pragma unroll
      for (int i = 0; i < bytes / 4; ++i) words[i] = at[i];
    }
  }
};

}  // namespace flashjit::device
