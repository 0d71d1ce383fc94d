// Matrix products of blocked attention by vectors of float32. One routine computes both: it multiplies values
// broadcast from K or V by vectors of query rows.
#pragma once

#include "cpu/tile.h"

namespace flashjit::device {

// Register tiles of 8 x 3 (AVX-512) or 4 x 3 (AVX2) accumulators: 11 loads for 24 FMAs, 7 for 12. `step`
// divides every head_dim.
constexpr int step = vector_registers / 4;

// Vectors of the next unit if `rows` rows are left: three, or two if the last vector would be alone
// otherwise. A unit has at least least_unit_rows, a divisor of block_m: fewer are the end of a long sequence.
inline constexpr int least_unit_rows = 16;
FLASHJIT_FN constexpr int unit_vectors(int rows) {
  const int left = ceil_div(rows, lanes);
  return left == 4 ? 2 : max(min(left, 3), least_unit_rows / lanes);
}
static_assert(cpu_unit_rows % (3 * lanes) == 0);

// Element (i, k) lies at data[i * i_stride + k * k_stride].
struct Matrix {
  const float* data;
  i64 i_stride, k_stride;
};

// out[i] = out[i] * scale + sum over k < depth of m(i, k) * rows[k], for i < count rounded up to whole steps.
// Without a scale, out is only written. rows: [depth][unit_rows], out: [count][unit_rows], scale:
// [unit_rows].
template <int vectors>
FLASHJIT_FN void multiply(Matrix m, const float* rows, int depth, const float* scale, float* out, int count) {
  constexpr int unit_rows = vectors * lanes, steps = vectors > 1 ? step : max(step, 8);
  for (; count > 0; count -= steps, m.data += steps * m.i_stride, out += steps * unit_rows) {
    Rows<vectors> sums[steps] = {};
    if (scale) {
      const auto by = load_rows<vectors>(scale);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
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
      for (int i = 0; i < steps; ++i) {
        const Vec x = splat(column[i * m.i_stride]);
#pragma unroll
        for (int j = 0; j < vectors; ++j) sums[i].v[j] = fma(x, r.v[j], sums[i].v[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) store(out + i * unit_rows, sums[i]);
  }
}

__attribute__((noinline)) inline void multiply(int unit_rows, Matrix m, const float* rows, int depth,
                                               const float* scale, float* out, int count) {
  if (unit_rows == 3 * lanes) return multiply<3>(m, rows, depth, scale, out, count);
  if (least_unit_rows == 2 * lanes || unit_rows == 2 * lanes)
    return multiply<2>(m, rows, depth, scale, out, count);
  if constexpr (least_unit_rows == lanes) multiply<1>(m, rows, depth, scale, out, count);
}

// Adds the same sum to out without terms of weight zero: a NaN or infinity in m reaches only rows that give
// it a weight.
__attribute__((noinline)) inline void add_weighted(int unit_rows, Matrix m, const float* rows, int depth,
                                                   float* out, int count) {
  for (int k = 0; k < depth; ++k, rows += unit_rows)
    for (int i = 0; i < count; ++i)
      for (int r = 0; r < unit_rows; r += lanes) {
        const Vec weight = load(rows + r), sum = load(out + i * unit_rows + r);
        const Vec x = splat(m.data[i * m.i_stride + k * m.k_stride]);
        store(out + i * unit_rows + r, select(weight == 0.0f, sum, fma(x, weight, sum)));
      }
}

// Converts `count` rows of a tensor to floats, [count][packed_stride]. Returns false if any element is NaN or
// infinite.
template <class Rows>
__attribute__((noinline)) bool pack(const Rows& rows, int count, int columns, float* packed,
                                    int packed_stride) {
  Int8 largest{};  // exponent and fraction bits, which order as magnitudes do
  constexpr int line = 64 / sizeof(*rows[0]);
  for (int i = 0; i < count; ++i, packed += packed_stride) {
    const auto* const row = rows[i];
    const auto* const ahead = rows[i + packed_rows_ahead];  // rows past the last are mostly the next call's
    for (int column = 0; column < columns; column += line) fetch(ahead + column);
    for (int column = 0; column < columns; column += 8) {
      const Vec8 v = load8(row + column);
      *reinterpret_cast<Vec8*>(packed + column) = v;
      const Int8 magnitude = reinterpret_cast<Int8>(v) << 1;
      largest = largest > magnitude ? largest : magnitude;
    }
  }
  return __builtin_reduce_max(largest) < 0xff000000u;
}

template <class Spec, class Config>
struct VectorProducts : Float32Weights {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int row_step = least_unit_rows, most_rows = cpu_unit_rows;
  static constexpr int k_row = cpu_packed_row(head_dim), v_row = cpu_packed_row(head_dim_v);
  using Element = typename Spec::Element;
  using Operand = float;
  static constexpr int q_row = head_dim, o_rows = head_dim_v;
  static constexpr int k_key = k_row, v_key = v_row;
  static constexpr int k_block = Config::block_n * k_row, v_block = Config::block_n * v_row;
  static constexpr int step_n = Config::block_n;

  FLASHJIT_FN static int next_unit_rows(int left) { return unit_vectors(left) * lanes; }

  FLASHJIT_FN static void pack_q(int unit_rows, const UnitRows<Element>& rows, float* room, float* q) {
    for (int row = 0; row < unit_rows; row += lanes) {
      const int end = min(row + lanes, rows.count), together = rows.heads == 1 ? lanes : 1;
      for (int i = row; i < end; i += together)
        pack(StridedRows<Element>{rows[i], rows.row_stride}, min(together, end - i), head_dim,
             room + (i - row) * k_row, k_row);
      for (int column = 0; column < head_dim; column += 4) {
        WordVec v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          v[j] = gather_words(
              [&](int i) __attribute__((always_inline)) { return room + (4 * i + j) * k_row + column; });
        transpose4(v);
#pragma unroll
        for (int j = 0; j < 4; ++j) store(q + (column + j) * unit_rows + row, reinterpret_cast<Vec>(v[j]));
      }
    }
  }
  template <class KeyRows>
  FLASHJIT_FN static void pack_k(const KeyRows& rows, int count, float* k) {
    pack(rows, count, head_dim, k, k_row);
  }
  template <class KeyRows>
  FLASHJIT_FN static bool pack_v(const KeyRows& rows, int count, float* v) {
    return pack(rows, count, head_dim_v, v, v_row);
  }

  static constexpr int score_blocks = 1;
  static constexpr bool ahead = false;
  FLASHJIT_FN static void finish() {}

  FLASHJIT_FN static void scores(int unit_rows, const float* k, const float* q, float* s, Span keys) {
    const int first = keys.begin / step * step;
    multiply(unit_rows, {k + first * k_row, k_row, 1}, q, head_dim, nullptr, s + first * unit_rows,
             keys.end - first);
  }
  FLASHJIT_FN static void add_product(int unit_rows, const float* v, const float* p, const float* alpha,
                                      float* o, Span keys) {
    multiply(unit_rows, {v + keys.begin * v_row, 1, v_row}, p, keys.size(), alpha, o, head_dim_v);
  }
  FLASHJIT_FN static void add_weighted(int unit_rows, const float* v, const float* p, float* o, Span keys) {
    device::add_weighted(unit_rows, {v + keys.begin * v_row, 1, v_row}, p, keys.size(), o, head_dim_v);
  }
};

}  // namespace flashjit::device
