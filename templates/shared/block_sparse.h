// Block-sparse masks. Each query block has a list of the key blocks that it sees, whole or by a bitmask. The
// mask's block sizes are its own; a kernel's tiles may have other sizes.
//
// of_masks: lists that were made of other masks, in shared/listed_mask.h. They also have blocks that the
// other masks test.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

template <int block_m, int block_n, bool per_head_, bool of_masks = false>
struct BlockSparse {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = per_head_;
  static constexpr bool padding = false;
  static constexpr int list_rows = block_m;
  static constexpr int words_per_row = ceil_div(block_n, 32);

  const BlockLists& lists;
  const int* offsets;

  template <class Params>
  FLASHJIT_FN BlockSparse(const Params& params, const Problem& p)
      : lists(params.blocks),
        offsets(lists.offsets + p.batch * lists.batch_stride +
                (per_head ? p.head_q * lists.head_stride : 0)) {}

  // The walk's place in the list, if the walk is across one query block only.
  template <class Axis>
  struct Cursor {
    int begin = -1, end = 0;
  };

  FLASHJIT_FN Span hull(Keys, Span rows) const {
    const Span m = covering(rows, block_m);
    Span h = {0x7fffffff, 0};
    for (int i = m.begin; i < m.end; ++i) {
      const Span list = list_of(i);
      if (list.empty()) continue;
      h.begin = min(h.begin, first_key(lists.blocks[list.begin]));
      h.end = max(h.end, first_key(lists.blocks[list.end - 1]) + block_n);
    }
    return h;
  }
  FLASHJIT_FN Span hull(Queries, Span) const { return {0, 0x7fffffff}; }

  FLASHJIT_FN bool whole(Span rows, Span keys, int found = not_found) const {
    if (found != not_found) return found == everywhere;
    const Span m = covering(rows, block_m), n = covering(keys, block_n);
    for (int i = m.begin; i < m.end; ++i) {
      const Span list = list_of(i);
      int entry = lower_bound(list, n.begin);
      for (int j = n.begin; j < n.end; ++j, ++entry)
        if (entry >= list.end || lists.blocks[entry] != j || bitmask_of(entry) != everywhere) return false;
    }
    return true;
  }
  FLASHJIT_FN bool keep(int row, int key) const { return tile().half(row, key / 16 * 16) >> key % 16 & 1; }

  struct Tile {
    const BlockSparse& mask;
    int found;
    bool fixed;          // `found` holds for all bits that will be asked for
    int m = -1, n = -1;  // the block that was looked up last

    // With of_masks: whether other masks may have to be asked, too.
    FLASHJIT_FN bool asks_masks() const { return !fixed || found == by_masks; }

    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) {
      if constexpr (block_n % keys == 0 && keys % word_keys == 0) {
        const int bitmask = look_up(row, key);
        const u32* const from = mask.words_of_row(bitmask, row) + key % block_n / word_keys;
        if (bitmask >= 0) {
          for (int i = 0; i < words_of<keys>; ++i) words[i] = from[i];
        } else {
          for (int i = 0; i < words_of<keys>; ++i) words[i] = keeps_all(bitmask) ? all_bits : 0;
        }
      } else {
        for (int i = 0; i < words_of<keys>; ++i) {
          words[i] = half(row, key + i * word_keys);
          if (i * word_keys + 16 < keys) words[i] |= half(row, key + i * word_keys + 16) << 16;
        }
      }
    }
    // The bits of 16 keys. No edge of a block lies between them.
    FLASHJIT_FN u32 half(int row, int key) {
      const int bitmask = look_up(row, key), column = key % block_n;
      if (bitmask < 0) return keeps_all(bitmask) ? 0xffff : 0;
      return mask.words_of_row(bitmask, row)[column / word_keys] >> column % word_keys & 0xffff;
    }

   private:
    FLASHJIT_FN int look_up(int row, int key) {
      if (!fixed && (row / block_m != m || key / block_n != n)) {
        m = row / block_m;
        n = key / block_n;
        found = mask.find(m, n);
      }
      return found;
    }
  };
  FLASHJIT_FN Tile tile() const { return {*this, not_found, false}; }
  template <int rows, int keys>
  FLASHJIT_FN Tile tile(int found) const {
    return {*this, found, block_m % rows == 0 && block_n % keys == 0};
  }
  FLASHJIT_FN int found(const Cursor<Keys>& cursor, Span keys) const {
    return cursor.begin >= 0 && covering(keys, block_n).size() == 1 ? bitmask_of(cursor.end - 1) : not_found;
  }

  FLASHJIT_FN int look_up(Span rows, Span keys) const {
    const Span m = covering(rows, block_m), n = covering(keys, block_n);
    return m.size() == 1 && n.size() == 1 ? find(m.begin, n.begin) : not_found;
  }

  FLASHJIT_FN int previous(Keys, Span rows, int bound, Cursor<Keys>& cursor) const {
    const Span m = covering(rows, block_m);
    if (m.size() == 1) {
      if (cursor.begin < 0) {
        const Span list = list_of(m.begin);
        cursor = {list.begin, list.end};
      }
      int& end = cursor.end;
      while (end > cursor.begin && first_key(lists.blocks[end - 1]) >= bound) --end;
      return end > cursor.begin ? min(bound, first_key(lists.blocks[end - 1]) + block_n) - 1 : -1;
    }
    int last = -1;
    for (int i = m.begin; i < m.end; ++i) {
      const Span list = list_of(i);
      const int end = lower_bound(list, (bound - 1) / block_n + 1);
      if (end > list.begin) last = max(last, min(bound, first_key(lists.blocks[end - 1]) + block_n) - 1);
    }
    return last;
  }
  // There are no lists of query blocks, so query blocks are looked up one by one.
  FLASHJIT_FN int previous(Queries, Span keys, int bound, Cursor<Queries>&) const {
    const Span n = covering(keys, block_n);
    for (int i = min((bound - 1) / block_m, lists.row_blocks - 1); i >= 0 && bound > 0; --i) {
      const Span list = list_of(i);
      const int entry = lower_bound(list, n.begin);
      if (entry < list.end && lists.blocks[entry] < n.end) return min(bound, (i + 1) * block_m) - 1;
    }
    return -1;
  }

 private:
  // Whether a block without a bitmask keeps all, as far as the lists say.
  FLASHJIT_FN static bool keeps_all(int found) { return of_masks ? found != nowhere : found == everywhere; }
  FLASHJIT_FN static Span covering(Span s, int size) { return {s.begin / size, (s.end - 1) / size + 1}; }
  // The first key of a block. `block` may be any number.
  FLASHJIT_FN static int first_key(int block) {
    return min(max(block, 0), 0x7fffffff / block_n - 1) * block_n;
  }

  // Entries of query block i.
  FLASHJIT_FN Span list_of(int i) const {
    if (i >= lists.row_blocks) return {0, 0};
    const int begin = min(max(offsets[i], 0), lists.num_blocks);
    return {begin, min(max(offsets[i + 1], begin), lists.num_blocks)};
  }
  // The list's first entry with a block of index n or later.
  FLASHJIT_FN int lower_bound(Span list, int n) const {
    while (list.begin < list.end) {
      const int middle = list.begin + list.size() / 2;
      if (lists.blocks[middle] < n) {
        list.begin = middle + 1;
      } else {
        list.end = middle;
      }
    }
    return list.begin;
  }
  FLASHJIT_FN int bitmask_of(int entry) const {
    const int at = lists.bitmask_of ? lists.bitmask_of[entry] : everywhere;
    const int others = of_masks && at != everywhere ? by_masks : everywhere;
    return static_cast<u32>(at) < static_cast<u32>(lists.num_bitmasks) ? at : others;
  }
  FLASHJIT_FN const u32* words_of_row(int bitmask, int row) const {
    return lists.bitmasks + (static_cast<i64>(bitmask) * block_m + row % block_m) * words_per_row;
  }
  // The number of the bitmask of block (m, n), or `everywhere`, `nowhere` or `by_masks`.
  FLASHJIT_FN int find(int m, int n) const {
    const Span list = list_of(m);
    const int entry = lower_bound(list, n);
    return entry < list.end && lists.blocks[entry] == n ? bitmask_of(entry) : nowhere;
  }
};

}  // namespace flashjit::device
