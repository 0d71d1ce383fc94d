// The inputs of formulas: tables, scalars, and the row, key and score that they are computed for.
#pragma once

#include "shared/formula_params.h"
#include "shared/formula_values.h"
#include "shared/mask.h"

namespace flashjit::device {

// outer: of batch entries or heads, whose strides are of 64 bits. Others fit 32 bits, in bytes, since one
// multiply-add then makes an address.
enum class Dimension { plain, outer, total_q, total_k };
using int32 = int;
using int8 = signed char;
using uint8 = unsigned char;

FLASHJIT_FN int table_element(int32 x) {
  return x;
}
FLASHJIT_FN int table_element(int8 x) {
  return x;
}
FLASHJIT_FN int table_element(uint8 x) {
  return x;
}
FLASHJIT_FN float table_element(fp32 x) {
  return x;
}
FLASHJIT_FN float table_element(bf16 x) {
  return __builtin_bit_cast(float, static_cast<u32>(x.bits) << 16);
}
FLASHJIT_FN float table_element(fp16 x) {
  const u32 digits = static_cast<u32>(x.bits & 0x7fff) << 13, sign = static_cast<u32>(x.bits & 0x8000) << 16;
  constexpr u32 least = 113u << 23;  // 2^-14: below it the exponent is that of 2^-14
  const float small = __builtin_bit_cast(float, least | digits) - __builtin_bit_cast(float, least);
  const u32 other = digits + (digits >= 31u << 23 ? 224u << 23 : 112u << 23);
  return __builtin_bit_cast(float, sign | (digits < 1u << 23 ? __builtin_bit_cast(u32, small) : other));
}
// The values that elements of a dtype may have.
FLASHJIT_FN Range<int> any_element(int32) {
  return any_int();
}
FLASHJIT_FN Range<int> any_element(int8) {
  return {-128, 127, false};
}
FLASHJIT_FN Range<int> any_element(uint8) {
  return {0, 255, false};
}
template <class Element>
FLASHJIT_FN Range<float> any_element(Element) {
  return any_real();
}
FLASHJIT_FN Integer<int> value_of(int x) {
  return Integer<int>(x);
}
FLASHJIT_FN Real<float> value_of(float x) {
  return Real<float>(x);
}
FLASHJIT_FN Integer<Range<int>> value_of(Range<int> x) {
  return Integer<Range<int>>(x);
}
FLASHJIT_FN Real<Range<float>> value_of(Range<float> x) {
  return Real<Range<float>>(x);
}

// A batch entry and some query heads, as formulas see them.
struct FormulaProblem {
  const FormulaParams& params;
  int batch, seqlen_q, seqlen_k, first_q, first_k;
  int heads_of_kv;  // query heads of each key/value head
  Span heads;       // of q

  template <class Params>
  FLASHJIT_FN FormulaProblem(const Params& p, const FormulaParams& formulas, const Problem& of)
      : params(formulas),
        batch(of.batch),
        seqlen_q(of.seqlen_q),
        seqlen_k(of.seqlen_k),
        first_q(of.first_q),
        first_k(of.first_k),
        heads_of_kv(static_cast<int>(static_cast<u32>(p.num_heads_q) / static_cast<u32>(p.num_heads_kv))),
        heads{of.head_q, of.head_q + 1} {}

  FLASHJIT_FN int shift() const { return seqlen_k - seqlen_q; }
  // Rows and keys as formulas count them, and where they end. formula_offsets.h has those of a shard.
  template <class R>
  FLASHJIT_FN static R row(R row) {
    return row;
  }
  template <class K>
  FLASHJIT_FN static K key(K key) {
    return key;
  }
  FLASHJIT_FN int rows_end() const { return seqlen_q; }
  FLASHJIT_FN int keys_end() const { return seqlen_k; }
  // Keys of the launch.
  FLASHJIT_FN static int own_key(int key) { return key; }
  FLASHJIT_FN static Span own_keys(Span keys) { return keys; }
  // The index within a table's dimension for a formula's index. An entry without rows or keys has none.
  template <Dimension dimension>
  FLASHJIT_FN int clamped(int index, int size) const {
    if constexpr (dimension == Dimension::total_q)
      index = max(min(index, seqlen_q - 1), 0) + first_q;
    else if constexpr (dimension == Dimension::total_k)
      index = max(min(index, seqlen_k - 1), 0) + first_k;
    return max(min(index, size - 1), 0);
  }
};

// The problem of kernels with the params. formula_offsets.h has that of a shard.
template <class Params>
struct FormulaProblemOf {
  using type = FormulaProblem;
};

// Several query heads.
struct HeadSpan {
  int low, high;
};
template <>
struct FormOf<HeadSpan> {
  using type = Ranges;
};
FLASHJIT_FN Range<int> in_form(Ranges, HeadSpan v) {
  return {v.low, v.high, false};
}
FLASHJIT_FN Range<float> real_of(HeadSpan v) {
  return real_of(in_form(Ranges{}, v));
}
FLASHJIT_FN Range<int> magnitude(HeadSpan v) {
  return magnitude(in_form(Ranges{}, v));
}
// The key/value heads of query heads.
FLASHJIT_FN int over_group(int head, int heads_of_kv) {
  return static_cast<int>(static_cast<u32>(head) / static_cast<u32>(heads_of_kv));
}
FLASHJIT_FN HeadSpan over_group(HeadSpan heads, int heads_of_kv) {
  return {over_group(heads.low, heads_of_kv), over_group(heads.high, heads_of_kv)};
}
template <class T>
struct IsRange {
  static constexpr bool value = false;
};
template <class T>
struct IsRange<Range<T>> {
  static constexpr bool value = true;
};
FLASHJIT_FN int heads_in(int) {
  return 1;
}
FLASHJIT_FN int heads_in(HeadSpan heads) {
  return heads.high - heads.low + 1;
}
FLASHJIT_FN int nth(int index, int) {
  return index;
}
FLASHJIT_FN int nth(HeadSpan heads, int i) {
  return min(heads.low + i, heads.high);
}

// Keeps a compiler for GPUs from extending x to 64 bits far from a multiplication, which would then be one of
// 64 bits.
FLASHJIT_FN int near_its_use(int x) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// A spec's table; its index is its place in FormulaParams. Dimensions that are left out are plain.
template <int index, class Element, Dimension... dimensions>
struct Table {
  static constexpr int place = index;
  template <class... Indices>
  FLASHJIT_FN static auto read(const FormulaProblem& problem, Indices... indices) {
    using Form = typename CommonForm<Indices...>::type;
    return read(Form{}, problem, indices...);
  }
  // The same, but where one index is a range of few places, and the others are single, all elements are read.
  template <class... Indices>
  FLASHJIT_FN static auto read_over(const FormulaProblem& problem, Indices... indices) {
    if constexpr ((int{IsRange<Indices>::value} + ... + 0) != 1) {
      return read(problem, indices...);
    } else {
      constexpr int most = 512;
      const Places places = places_of<0>(problem, indices...);
      auto known = point(read(Single{}, problem, single(indices, places.first)...).v);
      if (places.last - places.first >= most) return read(Ranges{}, problem, indices...);
      for (int place = places.first + 1; place <= places.last; ++place)
        known = choose(Maybe{true, true}, known, point(read(Single{}, problem, single(indices, place)...).v));
      return value_of(known);
    }
  }
  // Calls use(index within the dimension) for one dimension after the other.
  template <class Use, class... Indices>
  FLASHJIT_FN static void clamp(const FormulaProblem& problem, const Use& use, Indices... indices) {
    clamp_from<0>(problem, use, indices...);
  }

 private:
  // The least and the greatest index of a range within its dimension.
  struct Places {
    int first, last;
  };
  template <int dim, class First, class... Rest>
  FLASHJIT_FN static Places places_of(const FormulaProblem& problem, First first, Rest... rest) {
    if constexpr (IsRange<First>::value) {
      constexpr Dimension kind = dimension<dim>();
      const int size = kind == Dimension::total_q   ? problem.seqlen_q
                       : kind == Dimension::total_k ? problem.seqlen_k
                                                    : problem.params.tables[index].sizes[dim];
      return {max(min(first.low, size - 1), 0), max(min(first.high, size - 1), 0)};
    } else {
      return places_of<dim + 1>(problem, rest...);
    }
  }
  FLASHJIT_FN static int single(int other, int) { return other; }
  FLASHJIT_FN static int single(Range<int>, int place) { return place; }

  template <int dim>
  FLASHJIT_FN static constexpr Dimension dimension() {
    constexpr Dimension given[] = {dimensions..., Dimension::plain};
    return given[min(dim, static_cast<int>(sizeof...(dimensions)))];
  }
  template <int dim, class Use>
  FLASHJIT_FN static void clamp_from(const FormulaProblem&, const Use&) {}
  template <int dim, class Use, class... Rest>
  FLASHJIT_FN static void clamp_from(const FormulaProblem& problem, const Use& use, int first, Rest... rest) {
    use(problem.template clamped<dimension<dim>()>(first, problem.params.tables[index].sizes[dim]));
    clamp_from<dim + 1>(problem, use, rest...);
  }
  // In bytes.
  template <int dim>
  FLASHJIT_FN static i64 offset(const FormulaProblem&) {
    return 0;
  }
  template <int dim, class... Rest>
  FLASHJIT_FN static i64 offset(const FormulaProblem& problem, int first, Rest... rest) {
    const FormulaTable& table = problem.params.tables[index];
    constexpr Dimension kind = dimension<dim>();
    const i64 rest_offset = offset<dim + 1>(problem, rest...);
    const int at = problem.template clamped<kind>(first, table.sizes[dim]);
    if constexpr (kind == Dimension::outer)
      return at * table.strides[dim] * static_cast<i64>(sizeof(Element)) + rest_offset;
    const int stride = static_cast<int>(table.strides[dim]) * static_cast<int>(sizeof(Element));
    return i64{at} * near_its_use(stride) + rest_offset;
  }
  template <class... Indices>
  FLASHJIT_FN static auto read(Single, const FormulaProblem& problem, Indices... indices) {
    const auto* const data = static_cast<const char*>(problem.params.tables[index].data);
    return value_of(table_element(*reinterpret_cast<const Element*>(data + offset<0>(problem, indices...))));
  }
  // Lanes are the target's own.
  template <class Form, class... Indices>
  FLASHJIT_FN static auto read(Form form, const FormulaProblem& problem, Indices... indices) {
    return read_each(form, Table(), problem, indices...);
  }
  // Unknown, unless the indices are the batch entry and query heads.
  template <class... Indices>
  FLASHJIT_FN static auto read(Ranges, const FormulaProblem& problem, Indices... indices) {
    if constexpr ((... || IsRange<Indices>::value)) {
      return value_of(any_element(Element{}));
    } else {
      auto known = point(read(Single{}, problem, nth(indices, 0)...).v);
      for (int i = 1; i < (heads_in(indices) + ... + (1 - static_cast<int>(sizeof...(indices)))); ++i)
        known = choose(Maybe{true, true}, known, point(read(Single{}, problem, nth(indices, i)...).v));
      return value_of(known);
    }
  }
};
template <int index, class Type>
struct Scalar {
  template <class Problem>
  FLASHJIT_FN static auto read(const Problem& problem) {
    return value_of(__builtin_bit_cast(Type, problem.params.scalars[index]));
  }
};

// The scalars of a launch, without a row.
struct FormulaScalars {
  const FormulaParams& params;
  template <class Value>
  FLASHJIT_FN auto read(Value) const {
    return Value::read(*this);
  }
};

// A row as a formula sees it, or several, or all in a range. R: int, Range<int> or lanes.
template <class R, class H, class Problem = FormulaProblem>
struct FormulaRow {
  const Problem& problem;
  Integer<int> batch, seqlen_q, seqlen_k;
  Integer<R> row, position;
  Integer<H> head, head_kv;

  FLASHJIT_FN FormulaRow(const Problem& p, R of_row, H of_head)
      : problem(p),
        batch(p.batch),
        seqlen_q(p.rows_end()),
        seqlen_k(p.keys_end()),
        row(p.row(of_row)),
        position((row + Integer<int>(p.shift())).v),
        head(of_head),
        head_kv(over_group(of_head, p.heads_of_kv)) {}

  template <class Values, class... I>
  FLASHJIT_FN auto read(Values, Integer<I>... indices) const {
    return Values::read(problem, indices.v...);
  }
};
// And of keys. K: as R, and what a target has for keys of known distances.
template <class Row, class K>
struct FormulaKey : Row {
  Integer<K> key;
  FLASHJIT_FN FormulaKey(const Row& of_row, K of_key) : Row(of_row), key(of_row.problem.key(of_key)) {}
};
// And of scores.
template <class Key, class S>
struct FormulaScoreAt : Key {
  Real<S> score;
  FLASHJIT_FN FormulaScoreAt(const Key& of_key, S of_score) : Key(of_key), score(of_score) {}
};

// Up to eight values of a formula that no key changes.
struct NoValue {};
template <class A, class B = NoValue, class C = NoValue, class D = NoValue, class E = NoValue,
          class F = NoValue, class G = NoValue, class H = NoValue>
struct RowValues {
  A a;
  B b{};
  C c{};
  D d{};
  E e{};
  F f{};
  G g{};
  H h{};
};
template <class... Values>
FLASHJIT_FN RowValues<Values...> row_values(Values... values) {
  return {values...};
}

// Base of rendered formulas. A formula has
//   of_row(row)          the values that no key changes
//   value(at, of_row)    the formula
// or, with interval (shared/formula_interval.h),
//   of_tile(row)         the values that no row changes
//   begin(row, of_tile), end(row, of_tile)
//                        a row's keys, whatever its head
struct Formula {
  // Where a kernel's thread has many rows of few keys: of_key(at) has the values that no row changes, instead
  // of of_row().
  static constexpr bool by_key = false;
  template <class At>
  FLASHJIT_FN static NoValue of_key(const At&) {
    return {};
  }
  static constexpr bool reads_head = false;
  static constexpr bool loads = false;     // an element of a table for each key
  static constexpr bool interval = false;  // a mask's formula that keeps an interval of keys for each row
  template <class Row>
  FLASHJIT_FN static NoValue of_row(const Row&) {
    return {};
  }
  // A score's formula that is score + tilt() * (key - from()), or with the magnitude of the difference.
  static constexpr bool tilts = false;
  // A score's formula that is cap() * before_cap(); the same cap, not negative, for all scores.
  // caps_score: before_cap() is tanh(score / cap()).
  static constexpr bool caps = false, caps_score = false, precise = false;
  template <class Row>
  FLASHJIT_FN static NoValue of_tile(const Row&) {
    return {};
  }
  // In a backward (shared/formula_gradient.h) a score's formula has derivative(at, of_row), that by the
  // score, unless it is 1, and elements(at, of_row, add), which calls add(Read<i>(), table, derivative by the
  // element, indices...) for each of the `reads` elements that it reads and that are learned.
  static constexpr bool shifts = false;
  static constexpr int reads = 0;
  template <class At, class Row, class Add>
  FLASHJIT_FN static void elements(const At&, const Row&, const Add&) {}
};

// The values computed ahead, for one element.
template <class Formula, class Key>
FLASHJIT_FN auto ahead_of(const Key& at) {
  if constexpr (Formula::by_key)
    return Formula::of_key(at);
  else
    return Formula::of_row(at);
}

// Formulas of scores, applied one after the other. OfRow: what is computed ahead, OfKey the same for a key.
template <class... Formulas>
struct ScoreChain {
  static constexpr bool caps = false;
  template <class Row>
  struct OfRow {
    FLASHJIT_FN explicit OfRow(const Row&) {}
  };
  template <class Key>
  struct OfKey {
    FLASHJIT_FN explicit OfKey(const Key&) {}
  };
  template <bool without_cap = false, class Key, class Ahead, class S>
  FLASHJIT_FN static S apply(const Key&, const Ahead&, S score) {
    return score;
  }
};
template <class First, class... Rest>
struct ScoreChain<First, Rest...> {
  using Front = First;
  static constexpr bool last = sizeof...(Rest) == 0;
  static constexpr bool caps = last ? First::caps : ScoreChain<Rest...>::caps;
  template <class Scalars>
  FLASHJIT_FN static auto cap(const Scalars& scalars) {
    if constexpr (last)
      return First::cap(scalars);
    else
      return ScoreChain<Rest...>::cap(scalars);
  }
  template <class Row>
  struct OfRow {
    decltype(First::of_row(*static_cast<const Row*>(nullptr))) first;
    typename ScoreChain<Rest...>::template OfRow<Row> rest;
    FLASHJIT_FN explicit OfRow(const Row& row) : first(First::of_row(row)), rest(row) {}
  };
  template <class Key>
  struct OfKey {
    decltype(First::of_key(*static_cast<const Key*>(nullptr))) first;
    typename ScoreChain<Rest...>::template OfKey<Key> rest;
    FLASHJIT_FN explicit OfKey(const Key& key) : first(First::of_key(key)), rest(key) {}
  };
  // without_cap: the caller multiplies by cap().
  template <bool without_cap = false, class Key, class Ahead, class S>
  FLASHJIT_FN static auto apply(const Key& key, const Ahead& ahead, S score) {
    const FormulaScoreAt at(key, score);
    if constexpr (without_cap && last && caps)
      return in_form(typename FormOf<S>::type{}, First::before_cap(at, ahead.first).v);
    else
      return ScoreChain<Rest...>::template apply<without_cap>(
          key, ahead.rest, in_form(typename FormOf<S>::type{}, First::value(at, ahead.first).v));
  }
};

}  // namespace flashjit::device
