// A formula as a mask. Ranges of rows and keys say which blocks it keeps whole, and which it skips: there are
// no lists.
#pragma once

#include "shared/formula_interval.h"

namespace flashjit::device {

// Params: the kernel's, WithFormulas. A mask stands for the heads of its problem, until see_heads() says
// which.
template <class Formula, class Params>
struct FormulaMask {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = Formula::reads_head;
  static constexpr bool padding = false;
  static constexpr int list_rows = 0;
  template <class Axis>
  struct Cursor {};

  typename FormulaProblemOf<Params>::type problem;

  template <class BaseParams>
  FLASHJIT_FN FormulaMask(const BaseParams& p, const Problem& of)
      : problem(p, static_cast<const Params&>(p).formulas, of) {}

  // Whether all pairs, some or none are kept, as far as ranges tell.
  FLASHJIT_FN Maybe known(Span rows, Span keys) const {
    const Span heads = problem.heads;
    const FormulaRow row(problem, Range<int>{rows.begin, rows.end - 1, false},
                         HeadSpan{heads.begin, heads.end - 1});
    const FormulaKey at(row, Range<int>{keys.begin, keys.end - 1, false});
    return in_form(Ranges{}, Formula::value(at, ahead_of<Formula>(at)).v);
  }

  // All: a search takes long. searched_hull() makes one.
  FLASHJIT_FN Span hull(Keys, Span) const { return {0, problem.seqlen_k}; }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, problem.seqlen_q}; }
  FLASHJIT_FN bool whole(Span rows, Span keys, int = not_found) const {
    return !rows.empty() && !keys.empty() && known(rows, keys).certain();
  }
  FLASHJIT_FN bool keep(int row, int key) const {
    const FormulaKey at(FormulaRow(problem, row, problem.heads.begin), key);
    return Formula::value(at, ahead_of<Formula>(at)).v;
  }

  struct Tile {
    const FormulaMask& mask;
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) const {
      const FormulaRow at(mask.problem, row, mask.problem.heads.begin);
      [[maybe_unused]] const auto of_row = Formula::of_row(at);
      for (u32& word : words) word = 0;
      for (int i = 0; i < keys; ++i) {
        bool kept;
        if constexpr (Formula::by_key)
          kept = mask.keep(row, key + i);
        else
          kept = Formula::value(FormulaKey(at, key + i), of_row).v;
        words[i / word_keys] |= static_cast<u32>(kept) << i % word_keys;
      }
    }
  };
  FLASHJIT_FN Tile tile() const { return {*this}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int) const {
    return tile();
  }
  FLASHJIT_FN int found(const Cursor<Keys>&, Span) const { return not_found; }
  FLASHJIT_FN int look_up(Span, Span) const { return not_found; }

  static constexpr int step = search_step;

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>&) const {
    if (across.empty()) return -1;
    return last_that_may_hold(min(bound, hull(axis, across).end),
                              [&](Span some) { return pairs(axis, across, some).can_hold; });
  }
  // The first position from `begin` on of the first step that may keep a pair; the hull's end if none does.
  template <class Axis>
  FLASHJIT_FN int next(Axis axis, Span across, int begin) const {
    const int limit = hull(axis, across).end;
    for (int size = step; begin < limit && !across.empty();) {
      const int first = begin / step * step;
      const int end = size < limit - first ? first + size : limit;
      if (!pairs(axis, across, {begin, end}).can_hold) {
        begin = end;
        size = min(size, 1 << 29) * 2;
      } else if (end - first <= step) {
        return begin;
      } else {
        size = size / 2;
      }
    }
    return limit;
  }

 private:
  FLASHJIT_FN Maybe pairs(Keys, Span rows, Span keys) const { return known(rows, keys); }
  FLASHJIT_FN Maybe pairs(Queries, Span keys, Span rows) const { return known(rows, keys); }
};

template <class Blocks, class Others>
struct Listed;  // shared/listed_mask.h

template <class Formula, class Params>
inline constexpr bool has_formula<FormulaMask<Formula, Params>> = !Formula::interval;

template <class Formula, class Params>
FLASHJIT_FN Span searched_hull(const FormulaMask<Formula, Params>& mask, Span rows) {
  if constexpr (Formula::interval) {
    return mask.hull(Keys{}, rows);
  } else {
    typename FormulaMask<Formula, Params>::template Cursor<Keys> cursor;
    const int last = mask.previous(Keys{}, rows, largest_int, cursor);
    if (last < 0) return {0, 0};
    return {mask.next(Keys{}, rows, 0), last + 1};
  }
}

// For read_keys.h: heads may differ.
template <class Formula, class Params>
FLASHJIT_FN Span hull_of_heads(const FormulaMask<Formula, Params>& mask, Span rows) {
  return Formula::reads_head ? Span{0, largest_int} : searched_hull(mask, rows);
}

template <class Formula, class Params>
FLASHJIT_FN void see_heads(FormulaMask<Formula, Params>& mask, Span heads) {
  mask.problem.heads = heads;
}

}  // namespace flashjit::device
