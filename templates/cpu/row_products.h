// Products of a few rows with K and V as they lie in memory. Nothing is packed, so a row of K or V is loaded
// again for every group of rows: this suits keys that few rows see. Meanwhile rows of later keys are fetched,
// a cache line at a time between multiply-adds: the processor then computes while memory works.
#pragma once

#include "cpu/row_loads.h"
#include "shared/layout.h"

namespace flashjit::device {

// Columns of one load of K or V, and of a cache line.
template <class Element>
inline constexpr int load_columns_of = vectors_of_load<Element> * lanes;
template <class Element>
inline constexpr int line_columns = 64 / sizeof(Element);

// Rows that are multiplied at a time, unless one is left. Rows of K and V are fetched so many keys ahead.
inline constexpr int row_group = 4, rows_ahead = 32;

// Keys whose dot products with `rows` rows are computed at a time: one sum in each register, then one vector
// of results.
template <int rows>
inline constexpr int keys_at_once = lanes / rows;

// Dot products of `rows` rows of q with keys_at_once rows of K: element place(row, key) of the result. Rows
// of q lie q_row apart, in the order of columns of K's loads. The rows at next[] are fetched, between
// multiply-adds. The loop over the columns is not unrolled: otherwise the compiler gathers the fetches, and
// multiply-adds wait for them.
template <int rows, int columns, class Element, class Place>
FLASHJIT_FN Vec dot_products(const float* q, int q_row, const Element* const (&k)[keys_at_once<rows>],
                             const Element* const (&next)[keys_at_once<rows>], Place place) {
  constexpr int keys = keys_at_once<rows>, vectors = vectors_of_load<Element>;
  Vec sums[lanes] = {};
#pragma nounroll
  for (int c = 0; c < columns; c += load_columns_of<Element>) {
    Vec of_k[keys][vectors];
#pragma unroll
    for (int j = 0; j < keys; ++j) load_columns<columns>(k[j], c, of_k[j]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      for (int j = r; j < keys; j += rows) fetch(next[j] + c);
#pragma unroll
      for (int i = 0; i < vectors; ++i) {
        const Vec of_q = load(q + r * q_row + c + i * lanes);
#pragma unroll
        for (int j = 0; j < keys; ++j) {
          Vec& sum = sums[place(r, j)];
          sum = fma(of_q, of_k[j][i], sum);
        }
      }
    }
  }
  return sums_of(sums);
}

// The dot product of one row.
template <int columns, class Element>
FLASHJIT_FN float dot_product(const float* q, const Element* k, const Element* next) {
  constexpr int vectors = vectors_of_load<Element>;
  Vec sums[vectors] = {};
#pragma nounroll
  for (int c = 0; c < columns; c += load_columns_of<Element>) {
    fetch(next + c);
    Vec of_k[vectors];
    load_columns<columns>(k, c, of_k);
#pragma unroll
    for (int i = 0; i < vectors; ++i) sums[i] = fma(load(q + c + i * lanes), of_k[i], sums[i]);
  }
  return sum_of(vectors == 2 ? sums[0] + sums[vectors - 1] : sums[0]);
}

// Weights of rows and keys, at data[row * row_stride + key * key_stride].
struct Weights {
  const float* data;
  i64 row_stride, key_stride;
  FLASHJIT_FN float operator()(int row, int key) const { return data[row * row_stride + key * key_stride]; }
};

// A row's columns from `begin` on.
template <class Element>
FLASHJIT_FN const Element* columns_from(const Element* row, int begin) {
  return row + begin;
}

// Columns [begin, begin + width) of o += P V for `rows` rows and keys [0, keys). o: [rows][o_row], with the
// order of columns of V's loads. v(key), next(key): the row of a key, and the row that is fetched with it.
template <int rows, int width, bool fetches, class V, class Next>
FLASHJIT_FN void add_value_columns(Weights p, int keys, V v, Next next, float* o, int o_row, int begin) {
  using Element = __remove_cvref(decltype(*v(0)));
  constexpr int load_width = load_columns_of<Element>, of_load = vectors_of_load<Element>;
  constexpr int vectors = round_up(width, load_width) / lanes, line = line_columns<Element>;
  constexpr int lines = ceil_div(width, line), lines_at_once = ceil_div(lines, rows);
  o += begin;
  Vec sums[rows][vectors];
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int c = 0; c < vectors; ++c) sums[r][c] = load(o + r * o_row + c * lanes);
  for (int key = 0; key < keys; ++key) {
    const auto row = columns_from(v(key), begin);
    const Element* const later = next(key) + begin;
    Vec columns[vectors / of_load][of_load];
#pragma unroll
    for (int c = 0; c < width; c += load_width) load_columns<width>(row, c, columns[c / load_width]);
#pragma unroll
    for (int r = 0; r < rows; ++r) {
#pragma unroll
      for (int i = 0; i < lines; ++i)
        if (fetches && i / lines_at_once == r) fetch(later + i * line);
      const Vec weight = splat(p(r, key));
#pragma unroll
      for (int c = 0; c < vectors; ++c)
        sums[r][c] = fma(weight, columns[c / of_load][c % of_load], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int c = 0; c < vectors; ++c) store(o + r * o_row + c * lanes, sums[r][c]);
}

// o += P V. As many columns at a time as stay in registers.
template <int rows, int head_dim_v, bool fetches, class V, class Next>
FLASHJIT_FN void add_values(Weights p, int keys, V v, Next next, float* o, int o_row) {
  constexpr int width = vector_registers / 2 / rows * lanes, whole = head_dim_v / width * width;
#pragma nounroll
  for (int c = 0; c < whole; c += width)
    add_value_columns<rows, width, fetches>(p, keys, v, next, o, o_row, c);
  if constexpr (whole < head_dim_v)
    add_value_columns<rows, head_dim_v - whole, fetches>(p, keys, v, next, o, o_row, whole);
}

// The same for one row without terms of weight 0, so that NaN in V reaches only rows that see it.
template <int head_dim_v, class V>
FLASHJIT_FN void add_seen_values(Weights p, int row, int keys, V v, float* o) {
  using Element = __remove_cvref(decltype(*v(0)));
  for (int key = 0; key < keys; ++key) {
    const float weight = p(row, key);
    if (weight == 0) continue;
    const Element* const values = v(key);
#pragma nounroll
    for (int c = 0; c < head_dim_v; c += load_columns_of<Element>) {
      Vec columns[vectors_of_load<Element>];
      load_columns<head_dim_v>(values, c, columns);
      for (int j = 0; j < vectors_of_load<Element>; ++j) {
        float* const to = o + c + j * lanes;
        store(to, fma(splat(weight), columns[j], load(to)));
      }
    }
  }
}

}  // namespace flashjit::device
