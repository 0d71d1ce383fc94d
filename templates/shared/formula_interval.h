// A mask's formula that compares keys with what does not depend on them keeps an interval of keys for each
// row. Such a mask needs no search, and its elements need no formula.
#pragma once

#include "shared/formula.h"

namespace flashjit::device {

// Sums that stay at the ends of int's range: a limit beyond all keys must not wrap.
FLASHJIT_FN int bounded(i64 x) {
  return static_cast<int>(max(min(x, i64{largest_int}), i64{lowest_int}));
}
FLASHJIT_FN int bounded_plus(int a, int b) {
  return bounded(i64{a} + b);
}
FLASHJIT_FN int bounded_minus(int a, int b) {
  return bounded(i64{a} - b);
}
FLASHJIT_FN Range<int> bounded_plus(Range<int> a, Range<int> b) {
  return {bounded_plus(a.low, b.low), bounded_plus(a.high, b.high), false};
}
FLASHJIT_FN Range<int> bounded_minus(Range<int> a, Range<int> b) {
  return {bounded_minus(a.low, b.high), bounded_minus(a.high, b.low), false};
}
template <class A, class B>
FLASHJIT_FN auto bounded_sum(Integer<A> a, Integer<B> b) {
  using Form = typename CommonForm<A, B>::type;
  return integer(bounded_plus(in_form(Form{}, a.v), in_form(Form{}, b.v)));
}
template <class A, class B>
FLASHJIT_FN auto bounded_difference(Integer<A> a, Integer<B> b) {
  using Form = typename CommonForm<A, B>::type;
  return integer(bounded_minus(in_form(Form{}, a.v), in_form(Form{}, b.v)));
}

// Blocks of every kernel are multiples of so many positions.
constexpr int search_step = 16;

// The last position before `bound` of the last step that may keep a pair. What is skipped doubles, as long as
// nothing is kept there. may_hold(span): whether it may keep a pair.
template <class MayHold>
FLASHJIT_FN int last_that_may_hold(int bound, const MayHold& may_hold) {
  constexpr int step = search_step;
  int end = bound, size = step;
  while (end > 0) {
    const int last = (end - 1) / step * step;  // the first position of the last step
    const int begin = max(last + step - size, 0);
    if (!may_hold(Span{begin, end})) {
      end = begin;
      size = min(size, 1 << 29) * 2;
    } else if (begin == last) {
      return end - 1;
    } else {
      size = size / 2;
    }
  }
  return -1;
}

template <class Formula, class Params>
struct FormulaMask;  // shared/formula_mask.h

// Params: the kernel's, WithFormulas.
template <class Formula, class Params>
  requires Formula::interval
struct FormulaMask<Formula, Params> : Interval<FormulaMask<Formula, Params>> {
  using Problem = typename FormulaProblemOf<Params>::type;
  Problem problem;
  decltype(Formula::of_tile(*static_cast<const FormulaRow<int, int, Problem>*>(nullptr))) of_tile;

  template <class BaseParams>
  FLASHJIT_FN FormulaMask(const BaseParams& p, const device::Problem& of)
      : problem(p, static_cast<const Params&>(p).formulas, of),
        of_tile(Formula::of_tile(FormulaRow(problem, 0, problem.heads.begin))) {}

  FLASHJIT_FN Span hull(Keys, Span rows) const {
    if (rows.size() == 1) return of_row(rows.begin);
    const Limits limits = of_rows(rows);
    return within({limits.begin.low, limits.end.high});
  }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, problem.seqlen_q}; }
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    if (rows.empty() || keys.empty()) return false;
    const Limits limits = of_rows(rows);
    return within({limits.begin.high, limits.end.low}).contains(keys);
  }
  FLASHJIT_FN bool keep(int row, int key) const { return of_row(row).contains(key); }

  // The rows that keep a key need not be an interval: they are searched by ranges.
  template <class Axis>
  using Cursor = typename Interval<FormulaMask>::template Cursor<Axis>;
  FLASHJIT_FN int previous(Keys axis, Span rows, int bound, Cursor<Keys>& cursor) const {
    return Interval<FormulaMask>::previous(axis, rows, bound, cursor);
  }
  FLASHJIT_FN int previous(Queries, Span keys, int bound, Cursor<Queries>&) const {
    return last_that_may_hold(min(bound, problem.seqlen_q),
                              [&](Span rows) { return !intersect(hull(Keys{}, rows), keys).empty(); });
  }

 private:
  struct Limits {
    Range<int> begin, end;
  };
  FLASHJIT_FN Limits of_rows(Span rows) const {
    const FormulaRow at(problem, Range<int>{rows.begin, rows.end - 1, false}, problem.heads.begin);
    return {in_form(Ranges{}, Formula::begin(at, of_tile).v), in_form(Ranges{}, Formula::end(at, of_tile).v)};
  }
  FLASHJIT_FN Span of_row(int row) const {
    const FormulaRow at(problem, row, problem.heads.begin);
    return within({Formula::begin(at, of_tile).v, Formula::end(at, of_tile).v});
  }
  // Differences of these limits and keys do not wrap.
  FLASHJIT_FN Span within(Span keys) const {
    keys = problem.own_keys(keys);
    return {max(keys.begin, 0), max(min(keys.end, problem.seqlen_k), 0)};
  }
};

template <class Formula, class Params>
  requires Formula::interval
inline constexpr bool key_intervals<FormulaMask<Formula, Params>> = false;

}  // namespace flashjit::device
