// Gradients through formulas of scores: by the score before them, and by the elements of tables that they
// read.
#pragma once

#include "shared/exact_sum.h"
#include "shared/formula.h"

namespace flashjit::device {

// The number of an element that the formulas of a spec read, counted over all of them.
template <int index_>
struct Read {
  static constexpr int index = index_;
};

// Functors, since NVRTC takes no generic lambdas.
struct NoElements {
  template <class... Arguments>
  FLASHJIT_FN void operator()(const Arguments&...) const {}
};
// Passes derivatives of a formula's value on, times the gradient by it.
template <class G, class Add>
struct TimesGradient {
  G by_value;
  const Add& add;
  template <class Read, class Table, class Derivative, class... Indices>
  FLASHJIT_FN void operator()(Read read, Table table, Derivative derivative, Indices... indices) const {
    add(read, table, in_form(typename FormOf<G>::type{}, (Real<G>(by_value) * derivative).v), indices.v...);
  }
};

// Formulas of scores, backwards.
template <class... Formulas>
struct GradientChain {
  static constexpr bool shifts = true;  // no derivative by a score differs from 1
  static constexpr int reads = 0;
  template <class Key, class Ahead, class S, class G, class Add>
  FLASHJIT_FN static G apply(const Key&, const Ahead&, S, G gradient, const Add&) {
    return gradient;
  }
};
template <class First, class... Rest>
struct GradientChain<First, Rest...> {
  static constexpr bool shifts = First::shifts && GradientChain<Rest...>::shifts;
  static constexpr int reads = First::reads + GradientChain<Rest...>::reads;

  // Turns the gradient by the last formula's score into that by `score`, and calls add(read, table, gradient
  // by the element, indices...) for each element.
  template <class Key, class Ahead, class S, class G, class Add>
  FLASHJIT_FN static G apply(const Key& key, const Ahead& ahead, S score, G gradient, const Add& add) {
    using Form = typename FormOf<G>::type;
    const FormulaScoreAt at(key, score);
    const G by_value =
        sizeof...(Rest) == 0
            ? gradient
            : GradientChain<Rest...>::apply(key, ahead.rest, in_form(Form{}, First::value(at, ahead.first).v),
                                            gradient, add);
    if constexpr (First::reads > 0) First::elements(at, ahead.first, TimesGradient<G, Add>{by_value, add});
    if constexpr (First::shifts)
      return by_value;
    else
      return in_form(Form{}, (Real<G>(by_value) * First::derivative(at, ahead.first)).v);
  }
};

template <class Table, class Params>
FLASHJIT_FN const GradientTable& gradient_of(const Params& params) {
  return params.gradients.tables[Table::place];
}

// Where the gradient of an element lies: in `data`, or the first word of its exact sum.
template <class Table, bool exact, class... Indices>
FLASHJIT_FN i64 gradient_place(const FormulaProblem& problem, const GradientTable& gradient,
                               Indices... indices) {
  i64 place = 0;
  int dim = 0;
  const auto add = [&](int index) {
    place = exact ? place * gradient.sizes[dim] + index : place + index * gradient.strides[dim];
    ++dim;
  };
  Table::clamp(problem, add, indices...);
  return exact ? place * exact_sum_words : place;
}

}  // namespace flashjit::device
