// A block list as a mask: proof that the interface of shared/mask.h carries lists, partial blocks and state
// between calls, in both directions. Compiles wherever templates/ do.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

// Compressed rows of one direction: the blocks that list i holds, ascending, are block[begin[i]] ...
// block[begin[i + 1] - 1]; bits[e] is where entry e's bit per pair starts (row-major, size_m * size_n, one
// byte each), or -1 if all are kept.
struct BlockLists {
  const int* begin;
  const int* block;
  const int* bits;
};

struct BlockListView {
  BlockLists of_rows, of_keys;  // the same blocks, listed per query block and per key block
  const unsigned char* bits;
};
struct BlockListParams {
  BlockListView views[2];
};

template <int size_m, int size_n, int view = 0>
struct BlockList {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = false;
  static constexpr int remembered_lists = 2;
  static constexpr int nowhere = -2, everywhere = -1;

  BlockListView lists;
  int row_blocks, key_blocks;

  FLASHJIT_FN BlockList(const BlockListParams& params, const Problem& p)

      : lists(params.views[view]),
        row_blocks(ceil_div(p.seqlen_q, size_m)),
        key_blocks(ceil_div(p.seqlen_k, size_n)) {}

  // One end of what remains of each list; -1 before the first call.
  template <class Axis>
  struct Cursor {
    int remaining[remembered_lists] = {-1, -1};
  };

  FLASHJIT_FN Span hull(Keys axis, Span rows) const { return hull_of(axis, lists_across(axis, rows)); }
  FLASHJIT_FN Span hull(Queries axis, Span keys) const { return hull_of(axis, lists_across(axis, keys)); }

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>& cursor) const {
    const BlockLists& along = lists_of(axis);
    const int size = size_along(axis);
    const Span span = lists_across(axis, across);
    int last = -1;
    for (int list = span.begin; list < span.end; ++list) {
      int forgotten = -1;
      const int slot = list - span.begin;
      int& end = slot < remembered_lists ? cursor.remaining[slot] : forgotten;
      if (end < 0) end = along.begin[list + 1];
      while (end > along.begin[list] && along.block[end - 1] * size >= bound) --end;
      if (end > along.begin[list]) last = max(last, min(bound, (along.block[end - 1] + 1) * size) - 1);
    }
    return last;
  }

  FLASHJIT_FN bool whole(Span rows, Span keys) const {
    const Span m = covering(rows, size_m), n = covering(keys, size_n);
    for (int i = m.begin; i < m.end; ++i) {
      for (int j = n.begin; j < n.end; ++j) {
        if (find(i, j) != everywhere) return false;
      }
    }
    return true;
  }

  FLASHJIT_FN bool keep(int row, int key) const {
    return keep_in(find(row / size_m, key / size_n), row % size_m, key % size_n);
  }

  // Within one block the list is searched once.
  struct Tile {
    const BlockList& mask;
    bool one_block;
    int bits;
    FLASHJIT_FN bool keep(int row, int key) const {
      return one_block ? mask.keep_in(bits, row % size_m, key % size_n) : mask.keep(row, key);
    }
  };
  FLASHJIT_FN Tile tile(Span rows, Span keys) const {
    const Span m = covering(rows, size_m), n = covering(keys, size_n);
    const bool one_block = m.size() == 1 && n.size() == 1;
    return {*this, one_block, one_block ? find(m.begin, n.begin) : nowhere};
  }

 private:
  FLASHJIT_FN static Span covering(Span s, int size) { return {s.begin / size, ceil_div(s.end, size)}; }
  FLASHJIT_FN const BlockLists& lists_of(Keys) const { return lists.of_rows; }
  FLASHJIT_FN const BlockLists& lists_of(Queries) const { return lists.of_keys; }
  FLASHJIT_FN static int size_along(Keys) { return size_n; }
  FLASHJIT_FN static int size_along(Queries) { return size_m; }
  FLASHJIT_FN Span lists_across(Keys, Span rows) const {
    return intersect(covering(rows, size_m), {0, row_blocks});
  }
  FLASHJIT_FN Span lists_across(Queries, Span keys) const {
    return intersect(covering(keys, size_n), {0, key_blocks});
  }

  template <class Axis>
  FLASHJIT_FN Span hull_of(Axis axis, Span span) const {
    const BlockLists& along = lists_of(axis);
    Span h = {0x7fffffff, 0};
    for (int list = span.begin; list < span.end; ++list) {
      if (along.begin[list] == along.begin[list + 1]) continue;
      h.begin = min(h.begin, along.block[along.begin[list]] * size_along(axis));
      h.end = max(h.end, (along.block[along.begin[list + 1] - 1] + 1) * size_along(axis));
    }
    return h;
  }

  // Where the bits of block (m, n) start, everywhere or nowhere.
  FLASHJIT_FN int find(int m, int n) const {
    if (m >= row_blocks) return nowhere;
    int low = lists.of_rows.begin[m], high = lists.of_rows.begin[m + 1];
    const int end = high;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (lists.of_rows.block[middle] < n) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low < end && lists.of_rows.block[low] == n ? lists.of_rows.bits[low] : nowhere;
  }

  FLASHJIT_FN bool keep_in(int at, int row, int key) const {
    return at == everywhere || (at != nowhere && lists.bits[at + row * size_n + key] != 0);
  }
};

}  // namespace flashjit::device
