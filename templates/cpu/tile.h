// The parts of blocked attention on packed tiles. Everything is held transposed, query rows in the lanes of
// vectors:
//
//   S^T = K Q^T      keys x rows        the softmax over keys is lane by lane, with no horizontal operation
//   O^T = V^T P^T    columns x rows     P^T is S^T in place
//
// so that both products are the same register tile: `step` values broadcast from K or V times `row_vectors`
// vectors of rows. A unit is the rows of one register tile; its S^T stays in the first-level cache.
#pragma once

#include "cpu/vector.h"
#include "shared/layout.h"
#include "shared/mask.h"

namespace flashjit::device {

// 8 x 3 (AVX-512) or 4 x 3 (AVX2) accumulators: 11 loads for 24 FMAs or 7 for 12, and `step` divides every
// head_dim.
constexpr int row_vectors = 3;
constexpr int step = vector_registers / 4;
constexpr int unit_rows = row_vectors * lanes;
static_assert(cpu_unit_rows % unit_rows == 0);

// acc[i][j] += sum over k < depth of a[i * i_stride + k * k_stride] * rows[k][j]
template <int i_stride, int k_stride>
FLASHJIT_FN void multiply(Vec (&acc)[step][row_vectors], const float* a, const float* rows, int depth) {
#pragma unroll 2
  for (int k = 0; k < depth; ++k) {
    Vec r[row_vectors];
#pragma unroll
    for (int j = 0; j < row_vectors; ++j) r[j] = load(rows + j * lanes);
#pragma unroll
    for (int i = 0; i < step; ++i) {
      const Vec x = splat(a[i * i_stride]);
#pragma unroll
      for (int j = 0; j < row_vectors; ++j) acc[i][j] = fma(x, r[j], acc[i][j]);
    }
    a += k_stride;
    rows += unit_rows;
  }
}

// S^T of the keys in `keys`, rounded outwards to whole steps: what lies beyond is not to be read.
// k: [key][head_dim], q: [head_dim][unit_rows], s: [key][unit_rows].
template <int head_dim>
__attribute__((noinline)) void scores(const float* k, const float* q, float* s, Span keys) {
  for (int key = keys.begin / step * step; key < keys.end; key += step) {
    Vec acc[step][row_vectors] = {};
    multiply<head_dim, 1>(acc, k + key * head_dim, q, head_dim);
#pragma unroll
    for (int i = 0; i < step; ++i)
#pragma unroll
      for (int j = 0; j < row_vectors; ++j) store(s + (key + i) * unit_rows + j * lanes, acc[i][j]);
  }
}

// O^T = O^T * alpha + V^T P^T over `keys`. v: [head_dim_v / 8][group][key][8], p: [key][unit_rows], o:
// [head_dim_v][unit_rows].
template <int head_dim_v, int group>
__attribute__((noinline)) void accumulate(const float* v, const float* p, const float* alpha, float* o,
                                          Span keys) {
  for (int column = 0; column < head_dim_v; column += step, o += step * unit_rows) {
    Vec acc[step][row_vectors];
#pragma unroll
    for (int j = 0; j < row_vectors; ++j) {
      const Vec scale = load(alpha + j * lanes);
#pragma unroll
      for (int i = 0; i < step; ++i) acc[i][j] = load(o + i * unit_rows + j * lanes) * scale;
    }
    const float* a = v + column / 8 * group + column % 8 + keys.begin * 8;
    multiply<1, 8>(acc, a, p + keys.begin * unit_rows, keys.size());
#pragma unroll
    for (int i = 0; i < step; ++i)
#pragma unroll
      for (int j = 0; j < row_vectors; ++j) store(o + i * unit_rows + j * lanes, acc[i][j]);
  }
}

// Running softmax state of a unit's rows, base 2 with the scale folded in.
struct RowState {
  alignas(64) float maximum[unit_rows];  // of scale * score, -inf before the first key
  float sum[unit_rows];                  // of exp2(scale * score - maximum)
};

// Replaces S^T by P^T = exp2(scale * S^T - maximum), updates the state, and writes what earlier sums and
// outputs are to be multiplied by. A row that has seen nothing yet keeps maximum -inf and gets zeros.
__attribute__((noinline)) inline void softmax(float* s, float scale, RowState& state, float* alpha,
                                              Span keys) {
  Vec top[row_vectors], base[row_vectors], sum[row_vectors];
#pragma unroll
  for (int j = 0; j < row_vectors; ++j) top[j] = splat(minus_infinity);
  for (int key = keys.begin; key < keys.end; ++key)
#pragma unroll
    for (int j = 0; j < row_vectors; ++j) top[j] = larger(load(s + key * unit_rows + j * lanes), top[j]);
#pragma unroll
  for (int j = 0; j < row_vectors; ++j) {
    const Vec before = load(state.maximum + j * lanes);
    const Vec maximum = larger(top[j] * scale, before);
    base[j] = select(maximum == minus_infinity, Vec{}, maximum);
    const Vec a = exp2(before - base[j]);
    store(state.maximum + j * lanes, maximum);
    store(alpha + j * lanes, a);
    sum[j] = load(state.sum + j * lanes) * a;
  }
  for (int key = keys.begin; key < keys.end; ++key)
#pragma unroll
    for (int j = 0; j < row_vectors; ++j) {
      float* entry = s + key * unit_rows + j * lanes;
      const Vec p = exp2(fma(load(entry), splat(scale), -base[j]));
      store(entry, p);
      sum[j] += p;
    }
#pragma unroll
  for (int j = 0; j < row_vectors; ++j) store(state.sum + j * lanes, sum[j]);
}

// Scores that the mask leaves out become -inf. `first_key` is the position of s's key 0, `rows` the unit's
// rows.
template <class Mask>
__attribute__((noinline)) void apply_mask(const Mask& mask, float* s, Span rows, int first_key, Span keys) {
  if constexpr (Mask::row_intervals) {
    alignas(64) int begin[unit_rows], end[unit_rows];
    for (int i = 0; i < unit_rows; ++i) {
      const Span kept = mask.hull(Keys{}, {rows.begin + i, rows.begin + i + 1});
      begin[i] = kept.begin - first_key;
      end[i] = kept.end - first_key;
    }
    for (int key = keys.begin; key < keys.end; ++key)
#pragma unroll
      for (int j = 0; j < row_vectors; ++j) {
        float* entry = s + key * unit_rows + j * lanes;
        const IntVec keep = (load(begin + j * lanes) <= key) & (load(end + j * lanes) > key);
        store(entry, select(keep, load(entry), splat(minus_infinity)));
      }
  } else {
    const auto tile = mask.tile(rows, {first_key + keys.begin, first_key + keys.end});
    for (int key = keys.begin; key < keys.end; ++key)
      for (int i = 0; i < rows.size(); ++i)
        if (!tile.keep(rows.begin + i, first_key + key)) s[key * unit_rows + i] = minus_infinity;
  }
}

// Rows [0, count) of a tensor as floats, element (row, column) at row * row_stride + column / 8 * group +
// column % 8.
template <int columns, int row_stride, int group, class Element>
__attribute__((noinline)) void pack(const Element* rows, i64 stride, int count, float* packed) {
  for (int row = 0; row < count; ++row, rows += stride, packed += row_stride)
    for (int column = 0; column < columns; column += 8)
      *reinterpret_cast<Vec8*>(packed + column / 8 * group) = load8(rows + column);
}

// Q^T of one unit: [head_dim][unit_rows]. Lanes beyond `count` repeat the last row; nothing of theirs is
// written.
template <int head_dim, class Element>
__attribute__((noinline)) void pack_queries(const Element* rows, i64 stride, int count, float* packed) {
  for (int first = 0; first < unit_rows; first += lanes)
    for (int column = 0; column < head_dim; column += 8) {
      Vec v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Vec8 eights[lanes / 8];
#pragma unroll
        for (int g = 0; g < lanes / 8; ++g)
          eights[g] = load8(rows + min(first + g * 8 + i, count - 1) * stride + column);
        v[i] = join(eights);
      }
      transpose8(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) store(packed + (column + i) * unit_rows + first, v[i]);
    }
}

// The first `count` rows of O, normalised and rounded, from a unit's O^T: [head_dim_v][unit_rows].
template <int head_dim_v, class Element>
__attribute__((noinline)) void unpack_output(const float* o, const RowState& state, Element* rows, i64 stride,
                                             int count) {
  for (int first = 0; first < count; first += lanes) {
    const Vec sum = load(state.sum + first);
    const Vec inverse = select(sum == 0.0f, Vec{}, 1.0f / sum);
    for (int column = 0; column < head_dim_v; column += 8) {
      Vec v[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = load(o + (column + i) * unit_rows + first) * inverse;
      transpose8(v);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int g = 0; g < lanes / 8; ++g) {
          const int row = first + g * 8 + i;
          if (row < count) store8(rows + row * stride + column, row_of_eight(v[i], g));
        }
    }
  }
}

// Natural-log lse of the first `count` rows; -inf for a row that attended to nothing.
__attribute__((noinline)) inline void unpack_lse(const RowState& state, float* lse, i64 stride, int count) {
  for (int first = 0; first < count; first += lanes) {
    const Vec sum = load(state.sum + first);
    const Vec value = fma(load(state.maximum + first), splat(ln_2), log(sum));
    alignas(64) float values[lanes];
    store(values, select(sum == 0.0f, splat(minus_infinity), value));
    for (int i = 0; i < min(lanes, count - first); ++i) lse[(first + i) * stride] = values[i];
  }
}

}  // namespace flashjit::device
