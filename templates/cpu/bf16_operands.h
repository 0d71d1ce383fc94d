// Operands of products of bf16, by AMX or by vectors of pairs: bf16 in tiles of 1 kB, each in the layout of
// one of AMX's tile registers, padded with zeros beyond head_dim. Sums are float32.
//
//   K     a of S^T = K Q^T       16 keys x 32 columns
//   Q     b                      32 columns x 16 query rows; a row of the tile holds two columns
//   V^T   a of O^T += V^T P^T    16 columns x 32 keys
//   P     b                      32 keys x 16 query rows; a row of the tile holds two keys. A word of P takes
//                                the place of two scores; a row of P has one word for each query row
#pragma once

#include "cpu/tile.h"

namespace flashjit::device {

using HalfVec = unsigned short __attribute__((vector_size(4 * lanes)));

// Pointers to rows of so many columns of a tensor; rows from `count` on are zeros.
template <int rows, int columns>
struct RowPointers {
  static constexpr bf16 zeros[round_up(columns, 256)] = {};
  const bf16* data[rows];
  template <class KeyRows>
  FLASHJIT_FN static RowPointers first(const KeyRows& of, int count) {
    RowPointers r;
    for (int i = 0; i < rows; ++i) r.data[i] = i < count ? of[i] : zeros;
    return r;
  }
  RowPointers() = default;
  FLASHJIT_FN RowPointers(const UnitRows<bf16>& unit, int begin) {
    for (int i = 0; i < rows; ++i) data[i] = begin + i < unit.count ? unit[begin + i] : zeros;
  }
};

FLASHJIT_FN HalfVec larger_magnitudes(WordVec words, HalfVec than) {
  const HalfVec magnitude = reinterpret_cast<HalfVec>(words) << 1;
  return magnitude > than ? magnitude : than;
}

template <class Spec, class Config>
struct Bf16Operands {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int vectors = 2, unit_rows = vectors * lanes;
  static_assert(unit_rows == amx_unit);
  static constexpr int row_step = unit_rows, most_rows = unit_rows, only_rows = unit_rows;
  FLASHJIT_FN static int next_unit_rows(int) { return unit_rows; }
  using Operand = bf16;
  static constexpr int tile = 512;  // Operands in a tile
  static constexpr int k_tiles = ceil_div(head_dim, 32), v_tiles = round_up(ceil_div(head_dim_v, 16), 2);
  static constexpr int keys_whole = amx_unit, keys = round_up(Config::block_n, keys_whole);
  static constexpr int q_row = k_tiles * 32, o_rows = v_tiles * 16;
  static constexpr int k_key = k_tiles * 32, v_key = v_tiles * 16;
  static constexpr int k_block = keys * k_key, v_block = keys * v_key;

  // A row's maximum follows only when it has grown by more than 2^growth, so weights may exceed 1. bf16 has
  // the exponent range of the sums, which overflow only if V exceeds 2^96 over the number of keys. The
  // largest weight is rounded like the others; relative to the true maximum it would be exactly 1.
  static constexpr float growth = 32;
  static constexpr int maxima = 4, keys_together = 2;
  FLASHJIT_FN static Vec exp2(Vec x) { return exp2_to_bf16(x); }
  FLASHJIT_FN static void store_weights(float* p, const Vec (&weights)[2]) {
    constexpr u32 half = 0x8000;  // half a unit in the last place of bf16
    const WordVec low = reinterpret_cast<WordVec>(weights[0]) + half;
    const WordVec high = reinterpret_cast<WordVec>(weights[1]) + half;
    store(p, reinterpret_cast<Vec>(upper_halves(low, high)));
  }

  // q: [k_tiles][vectors] tiles.
  __attribute__((noinline)) static void pack_q(int, const UnitRows<bf16>& rows, float*, bf16* q) {
    for (int i = 0; i < vectors; ++i) {
      const RowPointers<16, head_dim> row(rows, 16 * i);
      const bf16* const next = rows[unit_rows + 16 * i];
      const i64 next_stride = rows.heads == 1 ? rows.row_stride : 0;
      for (int column = 0; column < k_tiles * 32; column += 8) {
        WordVec v[4] = {};
        if (column < head_dim) {
          fetch_rows<16, 8>(column, next, next_stride);
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[j] = gather_words([&](int i)
                                    __attribute__((always_inline)) { return row.data[4 * i + j] + column; });
          transpose4(v);
        }
        bf16* const to = q + (column / 32 * vectors + i) * tile + column % 32 * 16;
#pragma unroll
        for (int j = 0; j < 4; ++j) store(to + j * 32, v[j]);
      }
    }
  }
  // k: [keys / 16][k_tiles] tiles.
  template <class KeyRows>
  __attribute__((noinline)) static void pack_k(const KeyRows& rows, int count, bf16* k) {
    constexpr int whole = head_dim / 32 * 32;
    for (int key = 0; key < count; ++key) {
      const bf16* const row = rows[key];
      bf16* to = k + key / 16 * k_tiles * tile + key % 16 * 32;
      for (int column = 0; column < whole; column += 32, to += tile)
        store(to, load_unaligned<WordVec>(row + column));
      if constexpr (whole < head_dim) {
        alignas(64) bf16 rest[32] = {};
        __builtin_memcpy(rest, row + whole, sizeof(bf16) * (head_dim - whole));
        store(to, load_unaligned<WordVec>(rest));
      }
    }
  }
  // v: [keys / 32][v_tiles] tiles, with zeros for keys from `count` on.
  template <class KeyRows>
  __attribute__((noinline)) static bool pack_v(const KeyRows& rows, int count, bf16* v) {
    HalfVec largest{};  // exponent and fraction bits, which order as magnitudes do
    const auto row = RowPointers<packed_group, head_dim_v>::first(rows, count);
    for (int column = 0; column < v_tiles * 16; column += 8) {
      WordVec even[4] = {}, odd[4] = {};  // columns of keys 2 j and 2 j + 1
      if (column < head_dim_v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const WordVec low = gather_words(
              [&](int i) __attribute__((always_inline)) { return row.data[8 * i + 2 * j] + column; });
          const WordVec high = gather_words(
              [&](int i) __attribute__((always_inline)) { return row.data[8 * i + 2 * j + 1] + column; });
          largest = larger_magnitudes(low, larger_magnitudes(high, largest));
          even[j] = (low & 0xffffu) | (high << 16);
          odd[j] = upper_halves(low, high);
        }
        transpose4(even);
        transpose4(odd);
      }
      bf16* const to = v + column / 16 * tile + column % 16 * 32;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store(to + 2 * j * 32, even[j]);
        store(to + (2 * j + 1) * 32, odd[j]);
      }
    }
    return __builtin_reduce_max(largest) < 0xff00;
  }

  __attribute__((noinline)) static void add_weighted(int, const bf16* v, const float* p, float* o,
                                                     Span keys) {
    for (int key = keys.begin; key < keys.end; ++key) {
      const float* const words = p + (key - keys.begin) / 2 * unit_rows;
      for (int column = 0; column < head_dim_v; ++column) {
        const u32 bits = v[(key / 32 * v_tiles + column / 16) * tile + column % 16 * 32 + key % 32].bits;
        const Vec x = splat(__builtin_bit_cast(float, bits << 16));
        for (int r = 0; r < unit_rows; r += lanes) {
          const WordVec pair = reinterpret_cast<WordVec>(load(words + r));
          const Vec weight = reinterpret_cast<Vec>(key % 2 != 0 ? pair & 0xffff0000u : pair << 16);
          float* const sum = o + column * unit_rows + r;
          store(sum, select(weight == 0.0f, load(sum), fma(x, weight, load(sum))));
        }
      }
    }
  }

 protected:
  FLASHJIT_FN static const char* bytes(const void* p) { return static_cast<const char*>(p); }

  // Prepares O for the product of `keys`: multiplies O by alpha, unless every alpha is 1. If alpha is null,
  // the product overwrites O; without keys there is no product, so O is cleared.
  __attribute__((noinline)) static void rescale(const float* alpha, float* o, Span keys) {
    if (!alpha) {
      if (keys.empty()) clear(o, o_rows * unit_rows);
      return;
    }
    IntVec changed{};
    for (int i = 0; i < unit_rows; i += lanes) changed |= load(alpha + i) != 1.0f;
    if (!__builtin_reduce_or(changed)) return;
    const auto by = load_rows<vectors>(alpha);
    for (float* row = o; row < o + o_rows * unit_rows; row += unit_rows) {
      auto r = load_rows<vectors>(row);
      for (int i = 0; i < vectors; ++i) r.v[i] *= by.v[i];
      store(row, r);
    }
  }
};

}  // namespace flashjit::device
