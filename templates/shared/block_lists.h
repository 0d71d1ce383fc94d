// make_block_lists on every target: finds which blocks masks keep, whole or in part.
#pragma once

#include "shared/block_lists_params.h"
#include "shared/formula_mask.h"
#include "shared/listed_mask.h"

namespace flashjit::device {

// Rows of a mask's formula that knows which elements of tables the rows and keys of a block read.
template <class R>
struct ReadingRow : FormulaRow<R, int> {
  FLASHJIT_FN ReadingRow(const FormulaProblem& p, R rows) : FormulaRow<R, int>(p, rows, p.heads.begin) {}

  template <class Values>
  FLASHJIT_FN auto read(Values) const {
    return Values::read(this->problem);
  }
  template <class Values, class First, class... Rest>
  FLASHJIT_FN auto read(Values, Integer<First> first, Integer<Rest>... rest) const {
    return Values::read_over(this->problem, first.v, rest.v...);
  }
};

// Which of the pairs a mask keeps, as far as ranges tell. No span is empty.
template <class Mask>
FLASHJIT_FN Maybe known_pairs(const Mask& mask, Span rows, Span keys) {
  return {touches(mask, rows, keys), !mask.whole(rows, keys)};
}
template <class Formula, class Params>
FLASHJIT_FN Maybe known_pairs(const FormulaMask<Formula, Params>& mask, Span rows, Span keys) {
  const ReadingRow at(mask.problem, Range<int>{rows.begin, rows.end - 1, false});
  if constexpr (Formula::interval) {
    const auto begin = in_form(Ranges{}, Formula::begin(at, mask.of_tile).v),
               end = in_form(Ranges{}, Formula::end(at, mask.of_tile).v);
    return {!intersect({begin.low, end.high}, keys).empty(), !Span{begin.high, end.low}.contains(keys)};
  } else {
    const FormulaKey pairs(at, Range<int>{keys.begin, keys.end - 1, false});
    return in_form(Ranges{}, Formula::value(pairs, Formula::of_row(at)).v);
  }
}
template <class A, class B>
FLASHJIT_FN Maybe known_pairs(const Both<A, B>& mask, Span rows, Span keys) {
  const Maybe of_a = known_pairs(mask.a, rows, keys);
  return of_a.can_hold ? both(of_a, known_pairs(mask.b, rows, keys)) : of_a;
}

// The keys that a row keeps, key by key.
template <class Mask>
struct RowTest {
  const Mask& mask;
  int row;
  FLASHJIT_FN RowTest(const Mask& of, int of_row) : mask(of), row(of_row) {}
  FLASHJIT_FN bool operator()(int key) const { return mask.keep(row, key); }
};
template <class Mask>
  requires Mask::row_intervals
struct RowTest<Mask> {
  Span kept;
  FLASHJIT_FN RowTest(const Mask& of, int row) : kept(of.hull(Keys{}, {row, row + 1})) {}
  FLASHJIT_FN bool operator()(int key) const { return kept.contains(key); }
};
template <class Formula, class Params>
  requires(!Formula::interval)
struct RowTest<FormulaMask<Formula, Params>> {
  FormulaRow<int, int> row;
  decltype(Formula::of_row(*static_cast<const FormulaRow<int, int>*>(nullptr))) of_row;
  FLASHJIT_FN RowTest(const FormulaMask<Formula, Params>& mask, int at)
      : row(mask.problem, at, mask.problem.heads.begin), of_row(Formula::of_row(row)) {}
  FLASHJIT_FN bool operator()(int key) const { return Formula::value(FormulaKey(row, key), of_row).v; }
};
template <class A, class B>
  requires(!Both<A, B>::row_intervals)
struct RowTest<Both<A, B>> {
  RowTest<A> a;
  RowTest<B> b;
  FLASHJIT_FN RowTest(const Both<A, B>& mask, int row) : a(mask.a, row), b(mask.b, row) {}
  FLASHJIT_FN bool operator()(int key) const { return both(a(key), b(key)); }
};

// A test of pairs takes every so many rows, then those after them, and so on: blocks that are partly kept
// show it soon.
constexpr int test_stride = 8;

// The lists that a rendered Spec's mask asks for, and the masks that they are made of.
template <class Mask>
struct ListsOf;
template <int block_m_, int block_n_, bool per_head, class Others>
struct ListsOf<Both<Bounds, Listed<BlockSparse<block_m_, block_n_, per_head, true>, Others>>> {
  using Masks = Others;
  static constexpr int block_m = block_m_, block_n = block_n_, words_per_row = ceil_div(block_n, 32);
};

// One list: the key blocks of a query block of a batch entry and head.
template <class Spec>
struct BlockList {
  using Lists = ListsOf<typename Spec::Mask>;
  using Masks = typename Lists::Masks;

  const BlockListsParams& p;
  i64 group;
  int row_block, head, batch;

  FLASHJIT_FN BlockList(const BlockListsParams& params, i64 of_group, int block)
      : p(params),
        group(of_group),
        row_block(block),
        head(static_cast<int>(of_group % params.list_heads)),
        batch(static_cast<int>(of_group / params.list_heads)) {}

  FLASHJIT_FN Problem problem() const {
    return make_problem<Spec::varlen, Spec::Mask::padding>(p, batch, head);
  }
  FLASHJIT_FN Span rows(const Problem& of) const {
    return {row_block * Lists::block_m, min((row_block + 1) * Lists::block_m, of.seqlen_q)};
  }
  FLASHJIT_FN static Span keys(const Problem& of, int block) {
    return {block * Lists::block_n, min((block + 1) * Lists::block_n, of.seqlen_k)};
  }

  FLASHJIT_FN ListCounts* counts() const { return p.counts + group * p.row_blocks; }  // of the group
  FLASHJIT_FN Keeps& found(int block) const {
    return p.found[(group * p.row_blocks + row_block) * p.key_blocks + block];
  }
  // The place of the group's first block.
  FLASHJIT_FN int first_place() const { return static_cast<int>(group * p.row_blocks * p.key_blocks); }
  // Sets where the list begins; row_block may be row_blocks, where the last one ends.
  FLASHJIT_FN void set_offset(int place) const {
    p.offsets[batch * p.offsets_batch_stride + head * p.offsets_head_stride + row_block] = place;
  }
  // partial: the number of blocks of the group before this one that are kept in part.
  FLASHJIT_FN void set_block(int place, int block, Keeps keeps, int partial) const {
    p.indices[place] = block;
    p.bitmask_of[place] = keeps == Keeps::all ? -1 : bitmask(partial);
  }
  // The number of a block's bitmask; -2: the masks test the block.
  FLASHJIT_FN int bitmask(int partial) const {
    return partial < p.group_bitmasks ? static_cast<int>(group) * p.group_bitmasks + partial : -2;
  }
  // row: of the block.
  FLASHJIT_FN u32* words_of_row(int of_bitmask, int row) const {
    return p.bitmasks + (i64{of_bitmask} * Lists::block_m + row) * Lists::words_per_row;
  }
};
FLASHJIT_FN Keeps kept_of(Maybe pairs) {
  return !pairs.can_hold ? Keeps::nothing : pairs.can_fail ? Keeps::some : Keeps::all;
}

}  // namespace flashjit::device
