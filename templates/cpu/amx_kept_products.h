// Matrix products of blocked attention by AMX, for heads of at most 64 columns. All tiles of b stay in tile
// registers while the tiles of a are loaded one after the other; two sums are computed at a time. A step has
// just the keys that fill these registers. Its scores, the unit's O and its tiles of K and V then share the
// first-level cache: storing a sum elsewhere takes four times as long. No product runs beside the softmax: a
// step would need more keys for that.
#pragma once

#include "cpu/bf16_operands.h"

namespace flashjit::device {

template <class Spec, class Config>
struct AmxKeptProducts : TileRegisters, Bf16Operands<Spec, Config> {
  using Operands = Bf16Operands<Spec, Config>;
  using Operands::k_tiles, Operands::v_tiles, Operands::tile, Operands::unit_rows;
  static_assert(amx_keeps(Spec::head_dim, Spec::head_dim_v));

  static constexpr int step_n = min(amx_kept_keys, Operands::keys);
  static constexpr int score_blocks = 1, step_keys = 0;
  static constexpr bool ahead = false;
  FLASHJIT_FN void advance() {}
  FLASHJIT_FN void finish() {}

  __attribute__((noinline)) static void scores(int, const bf16* k, const bf16* q, float* s, Span keys) {
    const char* const b = bytes(q);
    load_tile<4>(b, 64), load_tile<5>(b + 1024, 64);
    if constexpr (k_tiles == 2) load_tile<6>(b + 2048, 64), load_tile<7>(b + 3072, 64);
    multiply<k_tiles>(bytes(k + keys.begin / 16 * k_tiles * tile), k_tiles * 1024, 1024, false,
                      s + keys.begin * unit_rows, keys.size() / 16);
  }
  __attribute__((noinline)) static void add_product(int, const bf16* v, const float* p, const float* alpha,
                                                    float* o, Span keys) {
    Operands::rescale(alpha, o, keys);
    if (keys.empty()) return;
    const char* const a = bytes(v + keys.begin / 32 * v_tiles * tile);
    load_tile<4>(p, row), load_tile<5>(p + 16, row);
    if (keys.size() == 32) return multiply<1>(a, 1024, v_tiles * 1024, alpha, o, v_tiles);
    load_tile<6>(p + 16 * unit_rows, row), load_tile<7>(p + 16 * unit_rows + 16, row);
    multiply<2>(a, 1024, v_tiles * 1024, alpha, o, v_tiles);
  }

 private:
  using Operands::bytes;
  static constexpr i64 row = 4 * unit_rows;  // bytes

  // out = a b, or out += a b if `add`, for `groups` times 16 rows. Tile registers 4 to 7 hold b. Tiles of a:
  // `next` is the bytes to the next 16 rows, `next_terms` the bytes to the next 32 terms of the sum.
  template <int terms>
  FLASHJIT_FN static void multiply(const char* a, int next, int next_terms, bool add, float* out,
                                   int groups) {
#pragma nounroll
    for (; groups > 0; --groups, a += next, out += 16 * unit_rows) {
      if (add)
        load_tile<0>(out, row), load_tile<1>(out + 16, row);
      else
        zero_tile<0>(), zero_tile<1>();
      load_tile<2>(a, 64);
      if constexpr (terms == 2) load_tile<3>(a + next_terms, 64);
      device::add_product<0, 2, 4>(), device::add_product<1, 2, 5>();
      if constexpr (terms == 2) device::add_product<0, 3, 6>(), device::add_product<1, 3, 7>();
      store_tile<0>(out, row), store_tile<1>(out + 16, row);
    }
  }
};

}  // namespace flashjit::device
