// The parts of blocked attention that are the same for every instruction set. Scores and outputs are held
// transposed: query rows are the lanes of vectors.
//
//   S^T = K Q^T      keys x rows        the softmax over keys is lane by lane, with no horizontal operation
//   O^T += V^T P^T   columns x rows     P^T takes the place of S^T
//
// A unit is the rows that the products compute at a time; its S^T stays in the first-level cache. A struct
// computes the products: VectorProducts (vector_products.h), AmxProducts (amx_products.h) or AmxKeptProducts
// (amx_kept_products.h). It has
//   next_unit_rows(left)         rows of the next unit if `left` rows are left: whole vectors, at most
//                                most_rows. Units of `left` rows have at most round_up(left, row_step) rows
//   only_rows                    rows of every unit if they are always the same, else 0
//   Operand                      element type of packed Q, K and V
//   q_row, k_block, v_block      Operands of a row of Q, of a block of K, of a block of V
//   k_key, v_key                 Operands from one key's K or V to the next key's
//   o_rows                       rows of O^T in memory
//   step_n                       keys whose scores a unit computes at a time, in whole groups
//   keys_whole                   keys in a group of weights; groups are counted from the block's first key
//   score_blocks                 steps whose scores are held at a time
//   ahead                        true: the scores of the next step are computed during the softmax
//   pack_q(unit_rows, rows, room, q)         packs a unit's rows of Q, by way of cpu_room() floats
//   pack_k(rows, count, k)                   packs rows[0] ... rows[count - 1] of K, at most packed_group;
//                                            up to packed_rows_ahead more are fetched into the cache
//   pack_v(rows, count, v)                   the same for V; returns whether all of it is finite. AMX fills
//                                            the group up with zeros
//   scores(unit_rows, k, q, s, keys)         S^T of a unit and keys of the block
//   add_product(unit_rows, v, p, alpha, o, keys)    O^T = O^T * alpha + V^T P^T; alpha null: O^T = V^T P^T
//   add_weighted(unit_rows, v, p, o, keys)          O^T += V^T P^T without terms of weight zero: a NaN or
//                                                   infinity in V reaches only rows that give it a weight
//   advance(), finish()          execute one step of the queued products; execute all of them
// and for the softmax
//   growth                       log2 of the growth up to which a row's maximum stays as it is
//   maxima                       keys whose maxima are found at a time
//   keys_together                keys whose weights are stored at a time
//   step_keys                    keys between two calls of advance(); 0: one call after all keys
//   exp2(x)                      2^x, as exact as stored weights are
//   store_weights(p, weights)    stores the weights of keys_together keys and a vector of rows
#pragma once

#include "cpu/vector.h"
#include "shared/dropout.h"
#include "shared/layout.h"
#include "shared/mask.h"

namespace flashjit::device {

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

// Running softmax of a unit's rows, base 2 with the scale folded in: maximum[unit_rows] of the scores, -inf
// before the first key, and sum[unit_rows] of exp2(scale * (score - maximum)).
struct RowState {
  float *maximum, *sum;
};

// Dropout of weights, after they are summed and before the product with V. KeepAll keeps all of them, Drop
// drops some.
struct KeepAll {
  struct Rows {
    FLASHJIT_FN Vec operator()(Vec weight, int) const { return weight; }
  };
  FLASHJIT_FN Rows rows(int) const { return {}; }
};
struct Drop {
  const u32 *multiplier, *addend;  // one for each row of the unit
  const u32* column;               // one for each key
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

// A tile's rows belong to `heads` heads in turn: row r is position r / heads of head r % heads. One head is
// the usual case and skips the division, whose time for each row would be noticeable.
FLASHJIT_FN int position_of(int row, int heads) {
  return heads == 1 ? row : row / heads;
}
FLASHJIT_FN i64 row_offset(int row, int heads, i64 row_stride, i64 head_stride) {
  const int position = position_of(row, heads);
  return position * row_stride + (row - position * heads) * head_stride;
}

// A unit's rows of a tensor: `count` rows from `first` on, of `heads` heads in turn.
template <class Element>
struct UnitRows {
  const Element* data;
  i64 row_stride, head_stride;
  int heads, first, count;
  FLASHJIT_FN const Element* operator[](int i) const {
    return data + row_offset(first + i, heads, row_stride, head_stride);
  }
};

// What the softmax asks of products whose weights are float32.
struct Float32Weights {
  static constexpr int only_rows = 0;
  static constexpr float growth = 0;
  static constexpr int keys_whole = 1, maxima = 2, keys_together = 1, step_keys = 0;
  FLASHJIT_FN static Vec exp2(Vec x) { return device::exp2(x); }
  FLASHJIT_FN static void store_weights(float* p, const Vec (&weights)[1]) { store(p, weights[0]); }
  FLASHJIT_FN static void advance() {}
};

// Rows of a tensor that lie evenly apart.
template <class Element>
struct StridedRows {
  const Element* data;
  i64 stride;
  FLASHJIT_FN const Element* operator[](int i) const { return data + i * stride; }
};
inline constexpr int packed_rows_ahead = 8;

// The exponent of a weight is scale * score - offset, in one operation; offset is scale * maximum, rounded.
// The rounding multiplies all weights of a row by the same factor, but at an offset of 2^31 that factor is
// beyond the range of exp2. If an offset exceeds far_offset, scores become differences from the maximum
// first.
constexpr float far_offset = 65536;

// Replaces S^T by P^T = exp2(scale * (S^T - maximum)), updates the state, and writes alpha, the factors for
// earlier sums and outputs. A row that has seen no key yet keeps maximum -inf and gets weights 0. Sums
// include dropped weights. `count` is a multiple of keys_together. Returns false if no row had seen a key
// before.
template <class Products, class Dropout>
__attribute__((noinline)) bool softmax(int given_rows, float* s, float scale, RowState state, float* alpha,
                                       int count, Dropout dropout, Products& products) {
  constexpr int maxima = Products::maxima, together = Products::keys_together;
  const int unit_rows = Products::only_rows ? Products::only_rows : given_rows;
  const float* const end = s + count * unit_rows;
  IntVec seen{};
#pragma nounroll
  for (int i = 0; i < unit_rows; i += lanes) {
    Vec top[maxima];  // several, which do not wait for each other
#pragma unroll
    for (int j = 0; j < maxima; ++j) top[j] = splat(minus_infinity);
    const float* p = s + i;
    for (; p + (maxima - 1) * unit_rows < end; p += maxima * unit_rows) {
#pragma unroll
      for (int j = 0; j < maxima; ++j) top[j] = larger(load(p + j * unit_rows), top[j]);
    }
    for (; p < end; p += unit_rows) top[0] = larger(load(p), top[0]);
#pragma unroll
    for (int j = 1; j < maxima; ++j) top[0] = larger(top[j], top[0]);
    const Vec before = load(state.maximum + i);
    seen |= before != minus_infinity;
    const IntVec grows =
        Products::growth == 0 ? top[0] > before : (top[0] - before) * scale > Products::growth;
    const Vec maximum = select(grows, top[0], before);
    const Vec reference = select(maximum == minus_infinity, Vec{}, maximum);
    const Vec rescale = exp2(select(before == minus_infinity, Vec{}, (before - reference) * scale));
    Vec minus_offset = reference * -scale;
    const IntVec far = __builtin_elementwise_abs(minus_offset) > far_offset;
    if (__builtin_reduce_or(far)) {
      const Vec moved = select(far, reference, Vec{});
      minus_offset = select(far, Vec{}, minus_offset);
#pragma nounroll
      for (float* q = s + i; q < end; q += unit_rows) store(q, load(q) - moved);
    }
    Vec sums[together] = {load(state.sum + i) * rescale};
    const auto kept = dropout.rows(i);
    const float* from = s + i;
    float* to = s + i;
    for (int key = 0; from < end; products.advance()) {
      const float* const stop = Products::step_keys ? min(from + Products::step_keys * unit_rows, end) : end;
#pragma nounroll
      for (; from < stop; key += together, from += together * unit_rows, to += unit_rows) {
        Vec weights[together];
#pragma unroll
        for (int j = 0; j < together; ++j) {
          const Vec e = Products::exp2(fma(load(from + j * unit_rows), splat(scale), minus_offset));
          sums[j] += e;
          weights[j] = kept(e, key + j);
        }
        Products::store_weights(to, weights);
      }
    }
#pragma unroll
    for (int j = 1; j < together; ++j) sums[0] += sums[j];
    store(state.maximum + i, maximum);
    store(state.sum + i, sums[0]);
    store(alpha + i, rescale);
  }
  return __builtin_reduce_or(seen);
}

// Sets the scores of the step's keys [begin, end) to -inf: no row sees these keys.
FLASHJIT_FN void leave_out(int unit_rows, float* s, int begin, int end) {
  for (int i = begin * unit_rows; i < end * unit_rows; i += lanes) store(s + i, splat(minus_infinity));
}

// Sets scores that the mask excludes to -inf. s: [key][unit_rows] for `keys`. Lanes past `rows` do not
// matter.
template <class Mask>
__attribute__((noinline)) void apply_mask(int unit_rows, const Mask& mask, float* s, Span rows, Span keys,
                                          int packed_heads) {
  if constexpr (Mask::row_intervals) {
    alignas(64) int begin[cpu_unit_rows], end[cpu_unit_rows];
    for (int i = 0; i < unit_rows; ++i) {
      const int row = position_of(rows.begin + i, packed_heads);
      const Span kept = mask.hull(Keys{}, {row, row + 1});
      begin[i] = kept.begin;
      end[i] = kept.end;
    }
    for (int i = 0; i < unit_rows; i += lanes) {
      const IntVec first = load(begin + i), last = load(end + i);
      const auto mask_keys = [&](Span some) {
        float* p = s + (some.begin - keys.begin) * unit_rows + i;
        for (int key = some.begin; key < some.end; ++key, p += unit_rows)
          store(p, select((first <= key) & (last > key), load(p), splat(minus_infinity)));
      };
      // Every row keeps the keys in between.
      const int middle = min(max(__builtin_reduce_max(first), keys.begin), keys.end);
      mask_keys({keys.begin, middle});
      mask_keys({max(__builtin_reduce_min(last), middle), keys.end});
    }
  } else {
    auto tile = mask.tile();
    alignas(64) int bits[cpu_unit_rows] = {};
    for (int key = keys.begin; key < keys.end;) {
      const int first = key / word_keys * word_keys;
      for (int i = 0; i < rows.size(); ++i) {
        u32 word[1];
        tile.template bits<word_keys>(position_of(rows.begin + i, packed_heads), first, word);
        bits[i] = static_cast<int>(word[0]);
      }
      for (; key < min(first + word_keys, keys.end); ++key, s += unit_rows)
        for (int i = 0; i < unit_rows; i += lanes)
          store(s + i,
                select((load(bits + i) >> (key - first) & 1) != 0, load(s + i), splat(minus_infinity)));
    }
  }
}

// Converts `lanes` rows of O to [lanes][columns] elements as they are stored, scaled and divided by their
// sums. A scale of 0 gives zeros, whatever O holds. o: [columns][unit_rows] and sum: [unit_rows], both from
// the first of these rows on. Meanwhile `next`, the destination of the rows after these, is fetched into the
// cache.
template <class Element, int columns>
__attribute__((noinline)) void unpack(const float* o, int unit_rows, float scale, const float* sum,
                                      Element* rows, const Element* next, i64 next_stride) {
  constexpr int together = 4 / sizeof(Element);
  const Vec sums = load(sum), inverse = scale / sums;
  const IntVec empty = (sums == 0.0f) | (splat(scale) == 0.0f);
  for (int column = 0; column < columns; column += 4 * together) {
    fetch_rows<lanes, 4 * together>(column, next, next_stride);
    WordVec words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Vec v[together];
#pragma unroll
      for (int j = 0; j < together; ++j, o += unit_rows) v[j] = select(empty, Vec{}, load(o) * inverse);
      words[i] = row_words<Element>(v);
    }
    transpose4(words);
#pragma unroll
    for (int i = 0; i < lanes; ++i)
      __builtin_memcpy(rows + i * columns + column, reinterpret_cast<const char*>(&words[i % 4]) + i / 4 * 16,
                       16);
  }
}

// Adds the result of the same rows for other keys. o, other_o: [columns][unit_rows].
__attribute__((noinline)) inline void merge(int unit_rows, float scale, RowState state, float* o,
                                            RowState other, const float* other_o, int columns) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const Vec here = load(state.maximum + i), there = load(other.maximum + i), maximum = larger(here, there);
    const Vec reference = select(maximum == minus_infinity, Vec{}, maximum);
    const Vec by = exp2((here - reference) * scale), other_by = exp2((there - reference) * scale);
    store(state.maximum + i, maximum);
    store(state.sum + i, fma(load(other.sum + i), other_by, load(state.sum + i) * by));
    for (int at = i; at < columns * unit_rows; at += unit_rows)
      store(o + at, fma(load(other_o + at), other_by, load(o + at) * by));
  }
}

FLASHJIT_FN bool saw_nothing(int unit_rows, RowState state) {
  IntVec seen{};
  for (int i = 0; i < unit_rows; i += lanes) seen |= load(state.maximum + i) != minus_infinity;
  return !__builtin_reduce_or(seen);
}

// Whole vectors: `count` is rounded up.
__attribute__((noinline)) inline void clear(float* p, int count) {
  for (int i = 0; i < count; i += lanes) store(p + i, Vec{});
}
__attribute__((noinline)) inline void make_zeros_positive(float* p, int count) {
  for (int i = 0; i < count; i += lanes) store(p + i, load(p + i) + 0.0f);
}
__attribute__((noinline)) inline void copy(float* to, const float* from, int count) {
  for (int i = 0; i < count; i += lanes) store(to + i, load(from + i));
}

// Replaces the maxima of a unit's rows by their lse, in natural logarithm; -inf for a row without keys.
__attribute__((noinline)) inline void make_lse(int unit_rows, float scale, RowState state) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const Vec sum = load(state.sum + i);
    const Vec value = fma(load(state.maximum + i), splat(scale * ln_2), log(sum));
    store(state.maximum + i, select(sum == 0.0f, splat(minus_infinity), value));
  }
}

}  // namespace flashjit::device
