// Gradients through formulas on vectors whose lanes are query rows, and the exact sums of what they give
// tables.
#pragma once

#include "cpu/backward.h"
#include "cpu/formula.h"
#include "shared/formula_gradient.h"

namespace flashjit::device {

__attribute__((noinline)) inline void add_exactly(i64* words, float term) {
  const bool finite = add_to_digits(term, [&](int word, i64 amount) __attribute__((always_inline)) {
    __atomic_fetch_add(words + word, amount, __ATOMIC_RELAXED);
  });
  if (finite) return;
  // Infinities and NaN: their sum does not depend on the order, but for the digits of NaN.
  u32 *const word = reinterpret_cast<u32*>(words), before = __atomic_load_n(word, __ATOMIC_RELAXED), after;
  do {
    const float sum = __builtin_bit_cast(float, before) + term;
    after = __builtin_bit_cast(u32, sum == sum ? sum : not_a_number);
  } while (!__atomic_compare_exchange_n(word, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

template <class Form>
constexpr bool is_single = false;
template <>
inline constexpr bool is_single<Single> = true;

// Terms of one element after the other: those that come in a row are added up before they go to memory.
struct TermsOfVector {  // of all lanes
  i64 place = -1;
  Vec sum{};
  FLASHJIT_FN void add(i64* sums, i64 to, Vec terms) {
    if (to != place) flush(sums), place = to;
    sum += terms;
  }
  FLASHJIT_FN void flush(i64* sums) {
    float all = 0;
    for (int i = 0; i < lanes; ++i) all += sum[i];
    if (place >= 0 && all != 0) add_exactly(sums + place, all);
    sum = Vec{};
  }
};
struct TermsOfLanes {  // of each lane
  i64 place[lanes];
  float sum[lanes] = {};
  FLASHJIT_FN void add(i64* sums, int lane, i64 to, float term) {
    if (to != place[lane]) flush(sums, lane), place[lane] = to;
    sum[lane] += term;
  }
  FLASHJIT_FN void flush(i64* sums, int lane) {
    if (sum[lane] != 0) add_exactly(sums + place[lane], sum[lane]);
    sum[lane] = 0;
  }
};

template <class Params, class... Formulas>
struct ScoreGradient<FormulaScore<Params, Formulas...>> {
  using Chain = GradientChain<Formulas...>;
  static constexpr bool changes = !Chain::shifts || Chain::reads > 0;

  // Turns gradients by final scores into those by `raw`, products of q and k without the scale, and adds what
  // elements get. Both: [key][unit_rows] for `keys`. A gradient of 0, as dropped pairs have it, gives zeros.
  template <class Base>
  __attribute__((noinline)) static void apply(const Base& p, const Problem& of, int unit_rows,
                                              const float* raw, float* gradients, Span rows, Span keys) {
    const Params& params = static_cast<const Params&>(p);
    const typename FormulaProblemOf<Params>::type problem(p, params.formulas, of);
    for (int i = 0; i < unit_rows; i += lanes) {
      const FormulaRow row(problem, plus(splat(rows.begin + i), lane_numbers()), of.head_q);
      const typename ScoreChain<Formulas...>::template OfRow<decltype(row)> of_row(row);
      [[maybe_unused]] TermsOfVector of_vectors[max(Chain::reads, 1)];
      [[maybe_unused]] TermsOfLanes of_lanes[max(Chain::reads, 1)];
      [[maybe_unused]] i64* sums[max(Chain::reads, 1)] = {};
      const float* s = raw + i;
      float* g = gradients + i;
      for (int key = keys.begin; key < keys.end; ++key, s += unit_rows, g += unit_rows) {
        const Vec gradient = load(g);
        const IntVec none = gradient == 0.0f;
        const auto add = [&](auto read, auto table, Vec terms,
                             auto... indices) __attribute__((always_inline)) {
          using Table = decltype(table);
          const GradientTable& to = gradient_of<Table>(params);
          sums[read.index] = to.sums;
          const Vec kept = select(none, Vec{}, terms);
          if constexpr (is_single<typename CommonForm<decltype(indices)...>::type>) {
            of_vectors[read.index].add(to.sums, gradient_place<Table, true>(problem, to, indices...), kept);
          } else {
            for (int lane = 0; lane < lanes; ++lane)
              if (kept[lane] != 0)
                of_lanes[read.index].add(to.sums, lane,
                                         gradient_place<Table, true>(problem, to, of_lane(indices, lane)...),
                                         kept[lane]);
          }
        };
        const Vec changed =
            Chain::apply(FormulaKey(row, key), of_row, load(s) * params.formulas.scale, gradient, add);
        store(g, select(none, Vec{}, changed));
      }
      for (int read = 0; read < Chain::reads; ++read) {
        of_vectors[read].flush(sums[read]);
        for (int lane = 0; lane < lanes; ++lane) of_lanes[read].flush(sums[read], lane);
      }
    }
  }
};

// Calls body(gradient, first, end) for the elements of items [begin, end).
template <class Params, class Body>
FLASHJIT_FN void for_each_sums(const Params& params, i64 begin, i64 end, const Body& body) {
  constexpr i64 of_item = cpu_backward_sums_of_item;
  for (const GradientTable& gradient : params.gradients.tables) {
    const i64 items = (gradient.count + of_item - 1) / of_item;
    const i64 first = max(begin, i64{0}) * of_item, last = min(end * of_item, gradient.count);
    if (first < last) body(gradient, first, last);
    begin -= items, end -= items;
  }
}
template <class Params>
__attribute__((noinline)) void clear_sums(const Params& params, i64 begin, i64 end) {
  for_each_sums(params, begin, end, [](const GradientTable& gradient, i64 first, i64 last) {
    for (i64 i = first * exact_sum_words; i < last * exact_sum_words; ++i) gradient.sums[i] = 0;
  });
}
// The last step: elements from their sums.
template <class Params>
FLASHJIT_FN void backward_tables(const Params& params, i64 begin, i64 end) {
  for_each_sums(params, begin, end, [](const GradientTable& gradient, i64 first, i64 last) {
    for (i64 i = first; i < last; ++i) *gradient.element(i) = exact_sum(gradient.sums + i * exact_sum_words);
  });
}

// A sink logit's weight in a row is exp(logit - lse). It has no value, so its gradient is that times -delta.
template <class Spec, class Params>
__attribute__((noinline)) void add_to_sink_logit(const Params& params, const Problem& problem, i64 row,
                                                 int rows) {
  float sum = 0;
  for (i64 i = row; i < row + rows; ++i) {
    if (params.offsets[i] == -minus_infinity) continue;  // no weights
    const Vec exponent = splat(sink_exponent<Spec>(params, problem.head_q, params.maxima[i]));
    const float weight = exp2(weight_exponent(exponent, splat(1.0f), splat(params.offsets[i])))[0];
    if (weight != 0) sum -= weight * params.deltas[i];
  }
  if (sum != 0)
    add_exactly(params.gradients.sink_logits().sums + static_cast<i64>(problem.head_q) * exact_sum_words,
                sum);
}

}  // namespace flashjit::device
