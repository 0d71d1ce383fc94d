// Backward by AMX, for bf16.
#pragma once

#include "cpu/backward_bf16.h"

namespace flashjit::device {

struct AmxBlockProduct : TileRegisters {
  // out = a b, or out += a b if `add`: 32 x 32 sums. `terms` has a bit for each 32 terms. Bytes: `a_next`
  // from the tile of a's first 16 rows to that of the others; `a_step`, `b_step` to the next 32 terms.
  __attribute__((noinline)) static void multiply(const bf16* a, i64 a_next, i64 a_step, const bf16* b,
                                                 i64 b_step, u32 terms, float* out, bool add) {
    constexpr i64 row = 4 * amx_unit, lower = 16 * amx_unit, tile_bytes = 1024;
    if (add)
      load_tile<0>(out, row), load_tile<1>(out + 16, row), load_tile<2>(out + lower, row),
          load_tile<3>(out + lower + 16, row);
    else
      zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
#pragma nounroll
    for (; terms != 0; terms &= terms - 1) {
      const int term = __builtin_ctz(terms);
      const char* const x = reinterpret_cast<const char*>(a) + term * a_step;
      const char* const y = reinterpret_cast<const char*>(b) + term * b_step;
      load_tile<6>(y, 64), load_tile<4>(x, 64);
      load_tile<7>(y + tile_bytes, 64), load_tile<5>(x + a_next, 64);
      add_product<0, 4, 6>(), add_product<1, 4, 7>();
      add_product<2, 5, 6>(), add_product<3, 5, 7>();
    }
    store_tile<0>(out, row), store_tile<1>(out + 16, row);
    store_tile<2>(out + lower, row), store_tile<3>(out + lower + 16, row);
  }
};

template <class Spec, class Config>
using AmxBackward = Bf16Backward<Spec, Config, AmxBlockProduct>;

}  // namespace flashjit::device
