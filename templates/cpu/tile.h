// The parts of blocked attention on packed tiles. Everything is held transposed, query rows in the lanes of
// vectors:
//
//   S^T = K Q^T      keys x rows        the softmax over keys is lane by lane, with no horizontal operation
//   O^T += V^T P^T   columns x rows     P^T is S^T in place
//
// so that both products are one: values broadcast from K or V times vectors of rows. A unit is the rows of
// one register tile; its S^T stays in the first-level cache.
#pragma once

#include "cpu/vector.h"
#include "shared/dropout.h"
#include "shared/layout.h"
#include "shared/mask.h"

namespace flashjit::device {

// Register tiles of 8 x 3 (AVX-512) or 4 x 3 (AVX2) accumulators: 11 loads for 24 FMAs, 7 for 12. `step`
// divides every head_dim.
constexpr int step = vector_registers / 4;

// Of the next unit where so many rows are left: three, or two where the last one would be alone otherwise.
FLASHJIT_FN constexpr int unit_vectors(int rows) {
  const int left = ceil_div(rows, lanes);
  return left == 4 ? 2 : min(left, 3);
}
static_assert(cpu_unit_rows % (3 * lanes) == 0);

// One value for each row of a unit.
template <int vectors>
struct Rows {
  static constexpr int size = vectors * lanes;
  Vec v[vectors];
};
template <int vectors>
FLASHJIT_FN Rows<vectors> load_rows(const float* p) {
  Rows<vectors> r;
#pragma unroll
  for (int i = 0; i < vectors; ++i) r.v[i] = load(p + i * lanes);
  return r;
}
template <int vectors>
FLASHJIT_FN void store(float* p, const Rows<vectors>& r) {
#pragma unroll
  for (int i = 0; i < vectors; ++i) store(p + i * lanes, r.v[i]);
}

// Element (i, k) at data[i * i_stride + k * k_stride].
struct Matrix {
  const float* data;
  i64 i_stride, k_stride;
};

// out[i] = out[i] * scale + sum over k < depth of m(i, k) * rows[k] for i < count, rounded up to whole steps;
// without a scale, out is only written. rows: [depth][unit_rows], out: [count][unit_rows], scale:
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
  if (unit_rows == 2 * lanes) return multiply<2>(m, rows, depth, scale, out, count);
  multiply<1>(m, rows, depth, scale, out, count);
}

// The same sum onto out, leaving out terms of weight zero: a NaN or infinity in m then stays with the rows it
// is for.
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

// Running softmax of a unit's rows, base 2 with the scale folded in: maximum[unit_rows] of scale * score,
// -inf before the first key, then sum[unit_rows] of exp2(scale * score - maximum).
struct RowState {
  float *maximum, *sum;
};

// What becomes of weights on their way from the sum to the product with V: nothing, or some are dropped.
struct KeepAll {
  struct Rows {
    FLASHJIT_FN Vec operator()(Vec weight, int) const { return weight; }
  };
  FLASHJIT_FN Rows rows(int) const { return {}; }
};
struct Drop {
  const u32 *multiplier, *addend;  // of the unit's rows
  const u32* column;               // of the keys
  u32 below;
  struct Rows {
    WordVec multiplier, addend;
    const u32* column;
    u32 below;
    FLASHJIT_FN Vec operator()(Vec weight, int key) const {
      return multiplier * column[key] + addend >= below ? weight : Vec{};
    }
  };
  FLASHJIT_FN Rows rows(int i) const { return {load(multiplier + i), load(addend + i), column, below}; }
};

// Replaces S^T by P^T = exp2(scale * S^T - maximum), updates the state, and writes what earlier sums and
// outputs are to be multiplied by. A row that has seen nothing yet keeps maximum -inf and gets zeros. Sums
// are of all weights, dropped or not.
template <class Dropout>
__attribute__((noinline)) void softmax(int unit_rows, float* s, float scale, RowState state, float* alpha,
                                       int count, Dropout dropout) {
  const float* const end = s + count * unit_rows;
#pragma nounroll
  for (int i = 0; i < unit_rows; i += lanes) {
    Vec top = splat(minus_infinity), other = top;  // two, not to wait for each other
    const float* q = s + i;
    for (; q + unit_rows < end; q += 2 * unit_rows) {
      top = larger(load(q), top);
      other = larger(load(q + unit_rows), other);
    }
    if (q < end) top = larger(load(q), top);
    top = larger(other, top);
    const Vec before = load(state.maximum + i);
    const Vec maximum = larger(top * scale, before);
    const Vec base = select(maximum == minus_infinity, Vec{}, maximum);
    const Vec rescale = exp2(before - base);
    Vec sum = load(state.sum + i) * rescale;
    const auto kept = dropout.rows(i);
    int key = 0;
#pragma nounroll
    for (float* p = s + i; p < end; p += unit_rows, ++key) {
      const Vec e = exp2(fma(load(p), splat(scale), -base));
      store(p, kept(e, key));
      sum += e;
    }
    store(state.maximum + i, maximum);
    store(state.sum + i, sum);
    store(alpha + i, rescale);
  }
}

// Scores that the mask leaves out become -inf. s: [key][unit_rows] for `keys`; lanes past `rows` do not
// matter.
template <class Mask>
__attribute__((noinline)) void apply_mask(int unit_rows, const Mask& mask, float* s, Span rows, Span keys,
                                          int packed_heads) {
  if constexpr (Mask::row_intervals) {
    alignas(64) int begin[cpu_unit_rows], end[cpu_unit_rows];
    for (int i = 0; i < unit_rows; ++i) {
      const int row = (rows.begin + i) / packed_heads;
      const Span kept = mask.hull(Keys{}, {row, row + 1});
      begin[i] = kept.begin;
      end[i] = kept.end;
    }
    for (int i = 0; i < unit_rows; i += lanes) {
      const IntVec first = load(begin + i), last = load(end + i);
      float* p = s + i;
      for (int key = keys.begin; key < keys.end; ++key, p += unit_rows)
        store(p, select((first <= key) & (last > key), load(p), splat(minus_infinity)));
    }
  } else {
    auto tile = mask.tile();
    alignas(64) int bits[cpu_unit_rows] = {};
    for (int key = keys.begin; key < keys.end;) {
      const int first = key / bits_keys * bits_keys;
      for (int i = 0; i < rows.size(); ++i)
        bits[i] = static_cast<int>(tile.bits((rows.begin + i) / packed_heads, first));
      for (; key < min(first + bits_keys, keys.end); ++key, s += unit_rows)
        for (int i = 0; i < unit_rows; i += lanes)
          store(s + i,
                select((load(bits + i) >> (key - first) & 1) != 0, load(s + i), splat(minus_infinity)));
    }
  }
}

// `count` rows of a tensor as floats, [count][packed_stride]. False if any is NaN or infinite.
template <class Element>
__attribute__((noinline)) bool pack(const Element* rows, i64 stride, int count, int columns, float* packed,
                                    int packed_stride) {
  Int8 largest{};  // exponent and fraction, which order as the magnitudes do
  constexpr int rows_ahead = 8, line = 64 / sizeof(Element);
  for (; count > 0; --count, rows += stride, packed += packed_stride) {
    if (count > rows_ahead)  // rows are apart, which no hardware foresees
      for (int column = 0; column < columns; column += line)
        __builtin_prefetch(rows + rows_ahead * stride + column);
    for (int column = 0; column < columns; column += 8) {
      const Vec8 v = load8(rows + column);
      *reinterpret_cast<Vec8*>(packed + column) = v;
      const Int8 magnitude = reinterpret_cast<Int8>(v) << 1;
      largest = largest > magnitude ? largest : magnitude;
    }
  }
  return __builtin_reduce_max(largest) < 0xff000000u;
}

// Consecutive 8 x 8 blocks: element (i, j) of block b at data[b * block_stride + i * row_stride + j].
struct Blocks {
  float* data;
  int row_stride, block_stride;
};

__attribute__((noinline)) inline void transpose(Blocks from, Blocks to, int count) {
  for (int b = 0; b < count; ++b, from.data += from.block_stride, to.data += to.block_stride) {
    Vec8 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = *reinterpret_cast<const Vec8*>(from.data + i * from.row_stride);
    transpose8(v);
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<Vec8*>(to.data + i * to.row_stride) = v[i];
  }
}

// `count` rows of O, scaled, divided by their sums and rounded; a scale of 0 makes zeros of anything. packed:
// [count][columns], sum: [count].
template <class Element>
__attribute__((noinline)) void unpack(const float* packed, int columns, float scale, const float* sum,
                                      Element* rows, i64 stride, int count) {
  for (int row = 0; row < count; ++row, packed += columns, rows += stride) {
    const bool empty = sum[row] == 0.0f || scale == 0.0f;
    const float inverse = scale / sum[row];
    for (int column = 0; column < columns; column += 8)
      store8(rows + column, empty ? Vec8{} : *reinterpret_cast<const Vec8*>(packed + column) * inverse);
  }
}

// Adds what the same rows of a unit got from other keys. o, other_o: [columns][unit_rows].
__attribute__((noinline)) inline void merge(int unit_rows, RowState state, float* o, RowState other,
                                            const float* other_o, int columns) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const Vec here = load(state.maximum + i), there = load(other.maximum + i), maximum = larger(here, there);
    const Vec base = select(maximum == minus_infinity, Vec{}, maximum);
    const Vec by = exp2(here - base), other_by = exp2(there - base);
    store(state.maximum + i, maximum);
    store(state.sum + i, fma(load(other.sum + i), other_by, load(state.sum + i) * by));
    for (int at = i; at < columns * unit_rows; at += unit_rows)
      store(o + at, fma(load(other_o + at), other_by, load(o + at) * by));
  }
}

// Of whole vectors.
FLASHJIT_FN void copy(float* to, const float* from, int count) {
  for (int i = 0; i < count; i += lanes) store(to + i, load(from + i));
}

// Natural-log lse of a unit's rows, in place of their maxima; -inf for a row that attended to nothing.
__attribute__((noinline)) inline void make_lse(int unit_rows, RowState state) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const Vec sum = load(state.sum + i);
    const Vec value = fma(load(state.maximum + i), splat(ln_2), log(sum));
    store(state.maximum + i, select(sum == 0.0f, splat(minus_infinity), value));
  }
}

}  // namespace flashjit::device
