// Writes new rows of K and V into their caches, with rotary embedding of K and Q, on a CPU.
#pragma once

#include "cpu/vector.h"
#include "shared/rotary.h"
#include "shared/token_place.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct AppendCpuSpec {
  static constexpr bool varlen = false, v_in_k = false;
  static constexpr RotaryStyle rotary = RotaryStyle::none;
  static constexpr int rotary_first = 0, rotary_dim = 0;  // with rotary: a dim of 0 is all columns from first
  static constexpr bool rotates_q = false;
  using RotaryTable = void;  // angles are computed
};

// Own: parameters besides those of rotary embedding.
template <class Spec, class Own = AppendParams>
struct Append {
  using Element = typename Spec::Element;
  using Table = typename Spec::RotaryTable;
  static constexpr bool rotates = Spec::rotary != RotaryStyle::none,
                        halves = Spec::rotary == RotaryStyle::half;
  static constexpr bool has_tables = is_table<Table>;
  static constexpr int dim = !rotates           ? 0
                             : Spec::rotary_dim ? Spec::rotary_dim
                                                : Spec::head_dim - Spec::rotary_first;
  static constexpr int pairs = dim / 2, vector = 8;

  using Params = typename Choose<rotates, Rotated<Own, has_tables ? 0 : pairs>, Own>::type;

  const Params& p;

  // Items are tokens.
  FLASHJIT_FN void run(i64 begin, i64 end) const {
    write_tokens(
        begin, end, [&](const TokenPlace& at, u32 head, const Angles& angles) __attribute__((always_inline)) {
          write(row_of(p.k_new, at, head), elements(p.k) + p.k.offset(at.page, at.page_row, head), angles);
          if constexpr (!Spec::v_in_k)
            copy<0, Spec::head_dim_v>(row_of(p.v_new, at, head),
                                      elements(p.v) + p.v.offset(at.page, at.page_row, head));
        });
  }

 protected:
  struct Angles {
    static constexpr int vectors = max(ceil_div(pairs, vector), 1);
    Vec8 cosines[vectors], sines[vectors];
  };

  // Calls write_head(place, head, angles) for each head of each token that goes into the caches. Writes Q.
  template <class WriteHead>
  FLASHJIT_FN void write_tokens(i64 begin, i64 end, const WriteHead& write_head) const {
    for (i64 token = begin; token < end; ++token) write_token(static_cast<int>(token), write_head);
  }
  template <class WriteHead>
  FLASHJIT_FN void write_token(int token, const WriteHead& write_head) const {
    TokenPlace at = row_of_token<Spec::varlen>(p, token);
    find_in_cache<Spec::varlen>(p, token, at);
    if (!at.in_batch) return;
    Angles angles;
    if constexpr (rotates)
      angles = angles_of(p.rotary.positions ? i64{p.rotary.positions[token]} : at.position);
    if (is_in_cache(p, at))
      for (u32 head = 0; head < p.heads_kv; ++head) write_head(at, head, angles);
    if constexpr (Spec::rotates_q)
      for (u32 head = 0; head < p.rotary.heads_q; ++head)
        write(row_of(p.rotary.q, at, head),
              elements(p.rotary.q_out) + p.rotary.q_out.offset(at.entry, at.row, head), angles);
  }

  FLASHJIT_FN static Element* elements(const TensorView& view) { return static_cast<Element*>(view.data); }
  FLASHJIT_FN static const Element* row_of(const TensorView& tokens, const TokenPlace& at, u32 head) {
    return elements(tokens) + tokens.offset(at.entry, at.row, head);
  }

  FLASHJIT_FN Angles angles_of(i64 position) const {
    Angles angles{};
#pragma unroll
    for (int i = 0; i < ceil_div(pairs, vector); ++i) {
      if constexpr (has_tables) {
        const i64 row = min(max(position, i64{0}), i64{p.rotary.table_rows} - 1);
        angles.cosines[i] = load_part(
            static_cast<const Table*>(p.rotary.cos) + row * p.rotary.cos_stride + i * vector, in_vector(i));
        angles.sines[i] = load_part(
            static_cast<const Table*>(p.rotary.sin) + row * p.rotary.sin_stride + i * vector, in_vector(i));
      } else {
        Int8 angle{};
        for (int j = 0; j < in_vector(i); ++j) angle[j] = angle_of(p.rotary.turns[i * vector + j], position);
        const Int8 quarter = (angle + 0x20000000u) >> 30;
        using Signed8 = int __attribute__((vector_size(32)));
        const Vec8 r = __builtin_convertvector(reinterpret_cast<Signed8>(angle - (quarter << 30)), Vec8) *
                       rest_to_radians;
        const Vec8 s = sine_of_rest(r), c = cosine_of_rest(r);
        const auto swaps = (quarter & 1) != 0;
        const Vec8 cosine = swaps ? s : c, sine = swaps ? c : s;
        angles.cosines[i] =
            reinterpret_cast<Vec8>(reinterpret_cast<Int8>(cosine) ^ ((quarter + 1) & 2) << 30);
        angles.sines[i] = reinterpret_cast<Vec8>(reinterpret_cast<Int8>(sine) ^ (quarter & 2) << 30);
      }
    }
    return angles;
  }
  // Pairs of a vector; the last one may be short.
  FLASHJIT_FN static constexpr int in_vector(int i) { return min(pairs - i * vector, vector); }

  template <class T>
  FLASHJIT_FN static Vec8 load_part(const T* from, int count) {
    if (count == vector) return load8(from);
    T part[vector] = {};
    for (int i = 0; i < count; ++i) part[i] = from[i];
    return load8(part);
  }
  template <class T>
  FLASHJIT_FN static void store_part(T* to, Vec8 v, int count) {
    if (count == vector) return store8(to, v);
    T part[vector];
    store8(part, v);
    for (int i = 0; i < count; ++i) to[i] = part[i];
  }

  // Both columns of a pair are read before one of them is written: `to` may be `from`.
  template <class T>
  FLASHJIT_FN static void write(const Element* from, T* to, const Angles& angles) {
    constexpr int first = Spec::rotary_first;
#pragma unroll
    for (int i = 0; i < ceil_div(pairs, vector); ++i) {
      const Vec8 cosine = angles.cosines[i], sine = angles.sines[i];
      if constexpr (halves) {
        const int column = first + i * vector;
        const Vec8 x = load_part(from + column, in_vector(i)),
                   y = load_part(from + pairs + column, in_vector(i));
        store_part(to + column, x * cosine - y * sine, in_vector(i));
        store_part(to + pairs + column, x * sine + y * cosine, in_vector(i));
      } else {
        const int column = first + 2 * i * vector, low = min(2 * in_vector(i), vector),
                  high = 2 * in_vector(i) - low;
        const Vec8 a = load_part(from + column, low);
        const Vec8 b = high ? load_part(from + column + vector, high) : Vec8{};
        const Vec8 x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
        const Vec8 y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
        const Vec8 even = x * cosine - y * sine, odd = x * sine + y * cosine;
        store_part(to + column, __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11), low);
        if (high)
          store_part(to + column + vector, __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15),
                     high);
      }
    }
    copy<0, first>(from, to);
    copy<first + dim, Spec::head_dim>(from, to);
  }

  // The bits of columns [begin, end).
  template <int begin, int end>
  FLASHJIT_FN static void copy(const Element* from, Element* to) {
    constexpr int whole = begin + (end - begin) / vector * vector;
    struct Eight {
      Element columns[vector];
    };
#pragma unroll
    for (int c = begin; c < whole; c += vector) {
      const Eight part = load_unaligned<Eight>(from + c);
      __builtin_memcpy(to + c, &part, sizeof part);
    }
    for (int c = whole; c < end; ++c) to[c] = from[c];
  }
  // The same columns as floats.
  template <int begin, int end>
  FLASHJIT_FN static void copy(const Element* from, float* to)
    requires(!__is_same(Element, float))
  {
#pragma unroll
    for (int c = begin; c < end; c += vector) {
      const int count = min(end - c, vector);
      store_part(to + c, load_part(from + c, count), count);
    }
  }
};

template <class Spec>
FLASHJIT_FN void append(const typename Append<Spec>::Params& params, i64 begin, i64 end) {
  Append<Spec>{params}.run(begin, end);
}

}  // namespace flashjit::device
