// The products of blocked attention by vectors of float32: values broadcast from K or V times vectors of
// rows, the same routine for both.
#pragma once

#include "cpu/tile.h"

namespace flashjit::device {

// Register tiles of 8 x 3 (AVX-512) or 4 x 3 (AVX2) accumulators: 11 loads for 24 FMAs, 7 for 12. `step`
// divides every head_dim. Tiles of two vectors are for blocks of a mask that three do not divide.
constexpr int step = vector_registers / 4;
constexpr int unit_vectors(int block_m) {
  return block_m % (3 * lanes) != 0 && block_m % (2 * lanes) == 0 ? 2 : 3;
}
static_assert(cpu_unit_rows % (3 * lanes) == 0);

// Element (i, k) at data[i * i_stride + k * k_stride].
struct Matrix {
  const float* data;
  i64 i_stride, k_stride;
};

// out[i] = out[i] * scale + sum over k < depth of m(i, k) * rows[k] for i < count, rounded up to whole steps;
// without a scale, out is only written. rows: [depth][unit_rows], out: [count][unit_rows], scale:
// [unit_rows].
template <int vectors>
__attribute__((noinline)) void multiply(Matrix m, const float* rows, int depth, const float* scale,
                                        float* out, int count) {
  constexpr int unit_rows = vectors * lanes;
  for (; count > 0; count -= step, m.data += step * m.i_stride, out += step * unit_rows) {
    Rows<vectors> sums[step] = {};
    if (scale) {
      const auto by = load_rows<vectors>(scale);
#pragma unroll
      for (int i = 0; i < step; ++i) {
        const auto r = load_rows<vectors>(out + i * unit_rows);
#pragma unroll
        for (int j = 0; j < vectors; ++j) sums[i].v[j] = r.v[j] * by.v[j];
      }
    }
    const float* column = m.data;
    const float* row = rows;
#pragma nounroll
    for (int k = 0; k < depth; ++k, column += m.k_stride, row += unit_rows) {
      const auto r = load_rows<vectors>(row);
#pragma unroll
      for (int i = 0; i < step; ++i) {
        const Vec x = splat(column[i * m.i_stride]);
#pragma unroll
        for (int j = 0; j < vectors; ++j) sums[i].v[j] = fma(x, r.v[j], sums[i].v[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < step; ++i) store(out + i * unit_rows, sums[i]);
  }
}

// The same sum onto out, leaving out terms of weight zero.
template <int vectors>
__attribute__((noinline)) void add_weighted(Matrix m, const float* rows, int depth, float* out, int count) {
  constexpr int unit_rows = vectors * lanes;
  for (int k = 0; k < depth; ++k, rows += unit_rows)
    for (int i = 0; i < count; ++i)
      for (int r = 0; r < unit_rows; r += lanes) {
        const Vec weight = load(rows + r), sum = load(out + i * unit_rows + r);
        const Vec x = splat(m.data[i * m.i_stride + k * m.k_stride]);
        store(out + i * unit_rows + r, select(weight == 0.0f, sum, fma(x, weight, sum)));
      }
}

// `count` rows of a tensor as floats, [count][packed_stride]. False if any is NaN or infinite.
template <class Element>
__attribute__((noinline)) bool pack(const Element* rows, i64 stride, int count, int columns, float* packed,
                                    int packed_stride) {
  Int8 largest{};  // exponent and fraction, which order as the magnitudes do
  for (; count > 0; --count, rows += stride, packed += packed_stride)
    for (int column = 0; column < columns; column += 8) {
      const Vec8 v = load8(rows + column);
      *reinterpret_cast<Vec8*>(packed + column) = v;
      const Int8 magnitude = reinterpret_cast<Int8>(v) << 1;
      largest = largest > magnitude ? largest : magnitude;
    }
  return __builtin_reduce_max(largest) < 0xff000000u;
}

template <class Spec, class Config>
struct VectorProducts {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int vectors = unit_vectors(Config::block_m), unit_rows = vectors * lanes;
  static constexpr int k_row = cpu_packed_row(head_dim), v_row = cpu_packed_row(head_dim_v);
  using Element = typename Spec::Element;
  using Operand = float;
  static constexpr int q_unit = head_dim * unit_rows, o_rows = head_dim_v;
  static constexpr int k_block = Config::block_n * k_row, v_block = Config::block_n * v_row;

  static constexpr float growth = 0;
  static constexpr int keys_whole = 1, maxima = 1, keys_together = 1;
  FLASHJIT_FN static Vec exp2(Vec x) { return device::exp2(x); }
  FLASHJIT_FN static void store_weights(float* p, const Vec (&weights)[1]) { store(p, weights[0]); }

  FLASHJIT_FN static void pack_q(const Element* rows, i64 stride, int count, float* room, float* q) {
    for (int row = 0; row < unit_rows; row += 8, rows += 8 * stride) {
      pack(rows, stride, min(8, count - row), head_dim, room, k_row);
      transpose({room, k_row, 8}, {q + row, unit_rows, 8 * unit_rows}, head_dim / 8);
    }
  }
  FLASHJIT_FN static void pack_k(const Element* rows, i64 stride, int count, float* k) {
    pack(rows, stride, count, head_dim, k, k_row);
  }
  FLASHJIT_FN static bool pack_v(const Element* rows, i64 stride, int count, float* v) {
    return pack(rows, stride, count, head_dim_v, v, v_row);
  }

  static constexpr int score_blocks = 1, step_keys = 0;
  static constexpr bool ahead = false;
  FLASHJIT_FN static void advance() {}
  FLASHJIT_FN static void finish() {}

  FLASHJIT_FN static void scores(const float* k, const float* q, float* s, Span keys) {
    const int first = keys.begin / step * step;
    multiply<vectors>({k + first * k_row, k_row, 1}, q, head_dim, nullptr, s + first * unit_rows,
                      keys.end - first);
  }
  FLASHJIT_FN static void add_product(const float* v, const float* p, const float* alpha, float* o,
                                      Span keys) {
    multiply<vectors>({v + keys.begin * v_row, 1, v_row}, p, keys.size(), alpha, o, head_dim_v);
  }
  FLASHJIT_FN static void add_weighted(const float* v, const float* p, float* o, Span keys) {
    device::add_weighted<vectors>({v + keys.begin * v_row, 1, v_row}, p, keys.size(), o, head_dim_v);
  }
};

}  // namespace flashjit::device
