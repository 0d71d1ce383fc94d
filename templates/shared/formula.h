// What formulas read: tables, scalars, and the row, key and score that they are computed for.
#pragma once

#include "shared/formula_params.h"
#include "shared/formula_values.h"
#include "shared/mask.h"

namespace flashjit::device {

enum class Dimension { plain, total_q, total_k };
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

// A spec's table; its index is its place in FormulaParams. `dimensions`: those of a total; others are plain.
template <int index, class Element, Dimension... dimensions>
struct Table {
  template <class... Indices>
  FLASHJIT_FN static auto read(const FormulaProblem& problem, Indices... indices) {
    using Form = typename CommonForm<Indices...>::type;
    return read(Form{}, problem, indices...);
  }

 private:
  template <int dim>
  static constexpr Dimension dimension() {
    constexpr Dimension given[] = {dimensions..., Dimension::plain};
    return dim < static_cast<int>(sizeof...(dimensions)) ? given[dim] : Dimension::plain;
  }
  template <int dim>
  FLASHJIT_FN static i64 offset(const FormulaProblem&) {
    return 0;
  }
  template <int dim, class... Rest>
  FLASHJIT_FN static i64 offset(const FormulaProblem& problem, int first, Rest... rest) {
    const FormulaTable& table = problem.params.tables[index];
    constexpr Dimension kind =
        dim < static_cast<int>(sizeof...(dimensions)) ? dimension<dim>() : Dimension::plain;
    return problem.template clamped<kind>(first, table.sizes[dim]) * table.strides[dim] +
           offset<dim + 1>(problem, rest...);
  }
  template <class... Indices>
  FLASHJIT_FN static auto read(Single, const FormulaProblem& problem, Indices... indices) {
    const Element* const data = static_cast<const Element*>(problem.params.tables[index].data);
    return value_of(table_element(data ? data[offset<0>(problem, indices...)] : Element{}));
  }
  FLASHJIT_FN static bool known(int) { return true; }
  FLASHJIT_FN static bool known(Range<int> i) { return i.low == i.high; }
  FLASHJIT_FN static int first(int i) { return i; }
  FLASHJIT_FN static int first(Range<int> i) { return i.low; }
  // Lanes are the target's own.
  template <class Form, class... Indices>
  FLASHJIT_FN static auto read(Form form, const FormulaProblem& problem, Indices... indices) {
    return read_each(form, Table(), problem, indices...);
  }
  // Known if one element is meant.
  template <class... Indices>
  FLASHJIT_FN static auto read(Ranges, const FormulaProblem& problem, Indices... indices) {
    if (!(known(indices) && ...)) return value_of(any_element(Element{}));
    return value_of(point(read(Single{}, problem, first(indices)...).v));
  }
};
template <int index, class Type>
struct Scalar {
  FLASHJIT_FN static auto read(const FormulaProblem& problem) {
    return value_of(__builtin_bit_cast(Type, problem.params.scalars[index]));
  }
};

// What a formula knows of a row, of several or of all in a range. R: int, Range<int> or lanes.
template <class R, class H>
struct FormulaRow {
  const FormulaProblem& problem;
  Integer<int> batch, seqlen_q, seqlen_k;
  Integer<R> row, position;
  Integer<H> head, head_kv;

  FLASHJIT_FN FormulaRow(const FormulaProblem& p, R of_row, H of_head)
      : problem(p),
        batch(p.batch),
        seqlen_q(p.seqlen_q),
        seqlen_k(p.seqlen_k),
        row(of_row),
        position((row + Integer<int>(p.shift())).v),
        head(of_head),
        head_kv((head / Integer<int>(p.heads_of_kv)).v) {}

  template <class Values, class... I>
  FLASHJIT_FN auto read(Values, Integer<I>... indices) const {
    return Values::read(problem, indices.v...);
  }
};
// And of keys. K: as R, and what a target has for keys of known distances.
template <class Row, class K>
struct FormulaKey : Row {
  Integer<K> key;
  FLASHJIT_FN FormulaKey(const Row& of_row, K of_key) : Row(of_row), key(of_key) {}
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
struct Formula {
  static constexpr bool reads_head = false;
  template <class Row>
  FLASHJIT_FN static NoValue of_row(const Row&) {
    return {};
  }
};

}  // namespace flashjit::device
