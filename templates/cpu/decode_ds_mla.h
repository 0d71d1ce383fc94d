// Decode over a cache of fp8_ds_mla (shared/ds_mla.h) on a CPU: how its keys are loaded. A row's scales are
// multiplied with its columns, since a row has four.
#pragma once

#include "cpu/decode.h"
#include "shared/ds_mla.h"

namespace flashjit::device {

// Columns of a key from `begin` on, a multiple of a load's.
struct DsMlaColumns {
  const fp8_ds_mla* key;
  int begin;
};
FLASHJIT_FN DsMlaColumns columns_from(const fp8_ds_mla* key, int begin) {
  return {key, begin};
}

template <int columns>
FLASHJIT_FN void load_columns(const fp8_ds_mla* key, int c, Vec (&to)[1]) {
  static_assert(DsMla::group % lanes == 0 && columns % lanes == 0);
  if (c < DsMla::columns) {
    float scale;
    __builtin_memcpy(&scale, key + DsMla::scales + c / DsMla::group * 4, sizeof scale);
    to[0] = load_floats<lanes>(reinterpret_cast<const fp8_e4m3*>(key + c)) * scale;
  } else {
    using Halves = unsigned short __attribute__((vector_size(2 * lanes)));
    const Halves bits = load_unaligned<Halves>(key + DsMla::rotary + (c - DsMla::columns) * 2);
    to[0] = reinterpret_cast<Vec>(__builtin_convertvector(bits, WordVec) << 16);
  }
}
template <int columns>
FLASHJIT_FN void load_columns(DsMlaColumns from, int c, Vec (&to)[1]) {
  load_columns<columns>(from.key, from.begin + c, to);
}

}  // namespace flashjit::device
