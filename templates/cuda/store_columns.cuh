// Stores of consecutive columns of a row, in the row's type.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// `columns` is 4 or a multiple of it.
template <int columns>
FLASHJIT_FN void store_columns(float* to, const float (&o)[columns]) {
#pragma unroll
  for (int c = 0; c < columns; c += 4) {
    const u32 words[] = {__float_as_uint(o[c]), __float_as_uint(o[c + 1]), __float_as_uint(o[c + 2]),
                         __float_as_uint(o[c + 3])};
    st_global_v4(to + c, words);
  }
}
// 4 or 8 columns.
template <class Narrow, int columns>
FLASHJIT_FN void store_columns(Narrow* to, const float (&o)[columns]) {
  u32 words[columns / 2];
#pragma unroll
  for (int c = 0; c < columns; c += 2) words[c / 2] = cvt_rn_x2(Narrow{}, o[c], o[c + 1]);
  if constexpr (columns == 4)
    st_global_v2(to, words);
  else
    st_global_v4(to, words);
}

}  // namespace flashjit::device
