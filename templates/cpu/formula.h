// Formulas on vectors, for the CPU kernels: the lanes are query rows in the forward, keys in the decode.
#pragma once

#include "cpu/formula_lanes.h"
#include "cpu/tile.h"
#include "shared/formula_mask.h"

namespace flashjit::device {

struct Lanes {};
template <>
struct FormOf<Vec> {
  using type = Lanes;
};
template <>
struct FormOf<IntVec> {  // a condition, too: all bits or none
  using type = Lanes;
};
FLASHJIT_FN Vec in_form(Lanes, Vec v) {
  return v;
}
FLASHJIT_FN IntVec in_form(Lanes, IntVec v) {
  return v;
}
FLASHJIT_FN Vec in_form(Lanes, float v) {
  return splat(v);
}
FLASHJIT_FN IntVec in_form(Lanes, int v) {
  return splat(v);
}
FLASHJIT_FN IntVec in_form(Lanes, bool v) {
  return splat(v ? -1 : 0);
}

// Relative errors are below 3e-7. Results below 2^-126 are zeros.
//
// exp: x = n log(2) + r, and a minimax fit of (exp(r) - 1 - r) / r^2.
FLASHJIT_FN Real<Vec> exp(Real<Vec> a) {
  const Vec x = larger(splat(-104.0f), a.v > 89.0f ? splat(89.0f) : a.v);
  const Vec n = __builtin_elementwise_roundeven(x * 1.44269504f);
  const Vec r = fma(n, splat(1.42860677e-6f), fma(n, splat(-0.693148613f), x));
  Vec p = splat(1.39504729e-3f);
  p = fma(p, r, splat(8.36888205e-3f));
  p = fma(p, r, splat(4.16662061e-2f));
  p = fma(p, r, splat(1.66665189e-1f));
  p = fma(p, r, splat(5.00000009e-1f));
  p = fma(p * r, r, r) + 1.0f;
  // In two steps: 2^n may be beyond float32.
  const IntVec power = __builtin_convertvector(n, IntVec), half = power >> 1;
  const auto power_of_2 = [](IntVec e) __attribute__((always_inline)) {
    return reinterpret_cast<Vec>((e + 127) << 23);
  };
  const Vec value = p * power_of_2(half) * power_of_2(power - half);
  return Real<Vec>(a.v == a.v ? value : a.v);
}
FLASHJIT_FN Real<Vec> log(Real<Vec> a) {
  const Vec x = a.v, small = a.v < 0x1p-126f ? splat(minus_infinity) : splat(infinity);
  const IntVec usual = (x >= 0x1p-126f) & (x < infinity);
  const Vec other = (x < 0.0f) | (x != x) ? splat(not_a_number) : small;
  return Real<Vec>(usual ? log(usual ? x : splat(1.0f)) : other);
}
// An odd minimax fit for small operands, else by exp.
FLASHJIT_FN Real<Vec> tanh(Real<Vec> a) {
  const Vec x = a.v, size = __builtin_elementwise_abs(x), z = x * x;
  Vec p = splat(-5.90586685e-3f);
  p = fma(p, z, splat(2.08053841e-2f));
  p = fma(p, z, splat(-5.37866838e-2f));
  p = fma(p, z, splat(1.33319583e-1f));
  p = fma(p, z, splat(-3.33332993e-1f));
  const Vec small = fma(p * z, x, x);
  const Vec large = 1.0f - 2.0f / (exp(Real<Vec>(size * 2.0f)).v + 1.0f);
  return Real<Vec>(size <= 0.6f ? small : (x < 0.0f ? -large : large));
}
FLASHJIT_FN Real<Vec> sqrt(Real<Vec> a) {
  return Real<Vec>(__builtin_elementwise_sqrt(a.v));
}
FLASHJIT_FN Real<float> exp(Real<float> a) {
  return Real<float>(exp(Real<Vec>(splat(a.v))).v[0]);
}
FLASHJIT_FN Real<float> log(Real<float> a) {
  return Real<float>(log(Real<Vec>(splat(a.v))).v[0]);
}
FLASHJIT_FN Real<float> tanh(Real<float> a) {
  return Real<float>(tanh(Real<Vec>(splat(a.v))).v[0]);
}
FLASHJIT_FN Real<float> sqrt(Real<float> a) {
  return Real<float>(sqrt(Real<Vec>(splat(a.v))).v[0]);
}
// All of them are precise here.
template <class V>
FLASHJIT_FN auto precise_exp(Real<V> a) {
  return exp(a);
}
template <class V>
FLASHJIT_FN auto precise_log(Real<V> a) {
  return log(a);
}
template <class V>
FLASHJIT_FN auto precise_tanh(Real<V> a) {
  return tanh(a);
}
template <class V>
FLASHJIT_FN auto precise_sqrt(Real<V> a) {
  return sqrt(a);
}
template <class V>
FLASHJIT_FN auto inverse(Real<V> a) {
  return real(1.0f / a.v);
}
template <class A, class B>
FLASHJIT_FN auto quotient(Real<A> a, Real<B> b) {
  return a / b;
}

FLASHJIT_FN Integer<IntVec> value_of(IntVec x) {
  return Integer<IntVec>(x);
}
FLASHJIT_FN Real<Vec> value_of(Vec x) {
  return Real<Vec>(x);
}
FLASHJIT_FN int of_lane(int x, int) {
  return x;
}
FLASHJIT_FN int of_lane(IntVec x, int lane) {
  return x[lane];
}
FLASHJIT_FN IntVec lanes_of(Integer<int>) {
  return {};
}
FLASHJIT_FN Vec lanes_of(Real<float>) {
  return {};
}
template <class Table, class... Indices>
FLASHJIT_FN auto read_each(Lanes, Table, const FormulaProblem& problem, Indices... indices) {
  auto values = lanes_of(Table::read(problem, of_lane(indices, 0)...));
#pragma nounroll
  for (int i = 0; i < lanes; ++i) values[i] = Table::read(problem, of_lane(indices, i)...).v;
  return value_of(values);
}

// Lane i holds i.
FLASHJIT_FN IntVec lane_numbers() {
  IntVec numbers;
#pragma unroll
  for (int i = 0; i < lanes; ++i) numbers[i] = i;
  return numbers;
}

// Rows [row, row + lanes) of the forward's tiles, or one row of a decode.
struct PackedRows {
  IntVec position, head;
  FLASHJIT_FN PackedRows(int first_head, int row, int packed_heads) {
    const IntVec rows = plus(splat(row), lane_numbers());
    position = packed_heads == 1 ? rows : over(rows, splat(packed_heads));
    head = plus(splat(first_head), minus(rows, times(position, splat(packed_heads))));
  }
};

// Formulas of scores. Before the first one scores get their natural scale.
template <class Params, class... Formulas>
struct FormulaScore {
  static constexpr bool changes = true;
  using Chain = ScoreChain<Formulas...>;

  template <class Any>
  FLASHJIT_FN static float scale_log2(const Any&) {
    return 1.44269504f;
  }

  // s: [key][unit_rows] for `keys`; `rows` are of a tile of packed_heads heads.
  template <class Base>
  __attribute__((noinline)) static void modify_rows(const Base& p, const Problem& of, int unit_rows, float* s,
                                                    Span rows, Span keys, int packed_heads) {
    const FormulaParams& params = static_cast<const Params&>(p).formulas;
    const typename FormulaProblemOf<Params>::type problem(p, params, of);
    for (int i = 0; i < unit_rows; i += lanes) {
      const PackedRows packed(of.head_q, rows.begin + i, packed_heads);
      // The usual case: what depends on the head alone is no vector.
      const auto modify = [&](auto row) __attribute__((always_inline)) {
        const typename Chain::template OfRow<decltype(row)> of_row(row);
        float* q = s + i;
        for (int key = keys.begin; key < keys.end; ++key, q += unit_rows)
          store(q, Chain::apply(FormulaKey(row, key), of_row, load(q) * params.scale));
      };
      if (packed_heads == 1)
        modify(FormulaRow(problem, packed.position, of.head_q));
      else
        modify(FormulaRow(problem, packed.position, packed.head));
    }
  }

  // s: the scores of one row, from key `first` on. Whole vectors are written.
  template <class Base>
  FLASHJIT_FN static void modify_keys(const Base& p, const Problem& of, float* s, int position, int head,
                                      Span keys) {
    const FormulaParams& params = static_cast<const Params&>(p).formulas;
    const typename FormulaProblemOf<Params>::type problem(p, params, of);
    const FormulaRow row(problem, position, head);
    const typename Chain::template OfRow<decltype(FormulaRow(problem, position, head))> of_row(row);
    for (int key = keys.begin; key < keys.end; key += lanes, s += lanes)
      store(s,
            Chain::apply(FormulaKey(row, plus(splat(key), lane_numbers())), of_row, load(s) * params.scale));
  }
};

// Sets scores that a mask with formulas excludes to -inf, as apply_mask() does.
template <class Mask>
FLASHJIT_FN void mask_rows(int unit_rows, const Mask& mask, float* s, Span rows, Span keys, int,
                           int packed_heads) {
  apply_mask(unit_rows, mask, s, rows, keys, packed_heads);
}
template <class A, class B>
FLASHJIT_FN void mask_rows(int unit_rows, const Both<A, B>& mask, float* s, Span rows, Span keys,
                           int first_head, int packed_heads) {
  mask_rows(unit_rows, mask.a, s, rows, keys, first_head, packed_heads);
  mask_rows(unit_rows, mask.b, s, rows, keys, first_head, packed_heads);
}
template <class Blocks, class Others>
FLASHJIT_FN void mask_rows(int unit_rows, const Listed<Blocks, Others>& mask, float* s, Span rows, Span keys,
                           int first_head, int packed_heads) {
  const int found = mask.blocks.look_up(
      {position_of(rows.begin, packed_heads), position_of(rows.end - 1, packed_heads) + 1}, keys);
  if (found != everywhere && found != by_masks)
    apply_mask(unit_rows, mask.blocks, s, rows, keys, packed_heads);
  if (found == by_masks || found == not_found)
    mask_rows(unit_rows, mask.others, s, rows, keys, first_head, packed_heads);
}
template <class Formula, class Params>
  requires(!Formula::interval)
__attribute__((noinline)) void mask_rows(int unit_rows, const FormulaMask<Formula, Params>& mask, float* s,
                                         Span rows, Span keys, int first_head, int packed_heads) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const PackedRows packed(first_head, rows.begin + i, packed_heads);
    const FormulaRow row(mask.problem, packed.position, packed.head);
    const auto of_row = Formula::of_row(row);
    float* q = s + i;
    for (int key = keys.begin; key < keys.end; ++key, q += unit_rows) {
      const IntVec kept = in_form(Lanes{}, Formula::value(FormulaKey(row, key), of_row).v);
      store(q, select(kept, load(q), splat(minus_infinity)));
    }
  }
}

// The same for one row of a decode, whose scores of `keys` begin at s. `others` masks what has no formula.
template <class Mask, class Others>
FLASHJIT_FN void mask_keys(const Mask& mask, float* s, int, int, Span, const Others& others) {
  others(mask, s);
}
template <class A, class B, class Others>
FLASHJIT_FN void mask_keys(const Both<A, B>& mask, float* s, int position, int head, Span keys,
                           const Others& others) {
  mask_keys(mask.a, s, position, head, keys, others);
  mask_keys(mask.b, s, position, head, keys, others);
}
template <class Formula, class Params, class Others>
  requires(!Formula::interval)
FLASHJIT_FN void mask_keys(const FormulaMask<Formula, Params>& mask, float* s, int position, int head,
                           Span keys, const Others&) {
  const FormulaRow row(mask.problem, position, head);
  const auto of_row = Formula::of_row(row);
  for (int key = keys.begin; key < keys.end; key += lanes, s += lanes) {
    const IntVec kept =
        in_form(Lanes{}, Formula::value(FormulaKey(row, plus(splat(key), lane_numbers())), of_row).v);
    store(s, select(kept, load(s), splat(minus_infinity)));
  }
}

// A logit of each query head, with which the sum of a row's softmax begins.
template <class Params>
struct SinkLogits {
  static constexpr bool exist = true;

  template <class Base>
  FLASHJIT_FN static float logit(const Base& p, int head) {
    const FormulaParams& params = static_cast<const Params&>(p).formulas;
    return params.sink_logits[head * params.sink_stride];
  }
  // In the scale of exponents of 2.
  template <class Base>
  FLASHJIT_FN static float log2(const Base& p, int head) {
    return logit(p, head) * 1.44269504f;
  }
  // Begins each row's sum with 2^sinks[row], and replaces maxima by lse as make_lse() does. The sum of a row
  // without keys stays 0.
  __attribute__((noinline)) static void add(int unit_rows, float scale, float* maxima, float* sums,
                                            const float* sinks) {
    for (int i = 0; i < unit_rows; i += lanes) {
      const Vec sum = load(sums + i), sink = load(sinks + i);
      const Vec maximum = sum == 0.0f ? splat(minus_infinity) : load(maxima + i) * scale;
      const Vec top = larger(maximum, sink), reference = top == minus_infinity ? Vec{} : top;
      const Vec kept = exp2(maximum - reference), all = fma(sum, kept, exp2(sink - reference));
      const Vec lse = fma(reference, splat(ln_2), log(all));
      store(maxima + i, all == 0.0f ? splat(minus_infinity) : lse);
      // Outputs are relative to the maximum. Where `kept` is 0, their share of the sum is 0, too.
      store(sums + i, sum == 0.0f ? Vec{} : all / kept);
    }
  }
};

}  // namespace flashjit::device
