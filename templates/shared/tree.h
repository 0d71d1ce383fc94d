// Trees of draft tokens (speculative decoding, Miao et al. 2023). Every row sees the prefix and the new keys
// in its bitmask: its ancestors and itself.
#pragma once

#include "shared/mask.h"

namespace flashjit::device {

struct Tree {
  static constexpr bool row_intervals = false;
  static constexpr bool per_head = false;
  static constexpr bool padding = false;
  static constexpr int list_rows = 0;
  template <class Axis>
  struct Cursor {};

  const TreeBits& tree;
  const u32* words;
  int prefix, end;  // keys from `end` on have no bits

  template <class Params>
  FLASHJIT_FN Tree(const Params& params, const Problem& p)
      : tree(params.tree), words(tree.words + p.batch * tree.batch_stride) {
    const int given = tree.prefix_lengths ? tree.prefix_lengths[p.batch] : p.seqlen_k - p.seqlen_q;
    prefix = min(max(given, 0), p.seqlen_k);
    end = tree.words_per_row > (p.seqlen_k - prefix - 1) / 32 ? p.seqlen_k : prefix + tree.words_per_row * 32;
  }

  FLASHJIT_FN Span hull(Keys, Span rows) const { return {0, rows.begin < tree.rows ? end : prefix}; }
  FLASHJIT_FN Span hull(Queries, Span keys) const {
    return {0, keys.begin < prefix ? 0x7fffffff : keys.begin < end ? tree.rows : 0};
  }
  FLASHJIT_FN bool whole(Span, Span keys, int = not_found) const { return keys.end <= prefix; }
  FLASHJIT_FN bool keep(int row, int key) const { return key < prefix || (bits_from(row, key - prefix) & 1); }

  struct Tile {
    const Tree& mask;
    template <int keys>
    FLASHJIT_FN void bits(int row, int key, u32 (&words)[words_of<keys>]) const {
      for (int i = 0; i < words_of<keys>; ++i) {
        // The prefix may end within a word.
        const int column = key + i * word_keys - mask.prefix;
        words[i] = column >= 0            ? mask.bits_from(row, column)
                   : column <= -word_keys ? all_bits
                                          : low_bits(-column) | mask.bits_from(row, 0) << -column;
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

  template <class Axis>
  FLASHJIT_FN int previous(Axis axis, Span across, int bound, Cursor<Axis>&) const {
    return min(bound, hull(axis, across).end) - 1;
  }

 private:
  // The bits of new keys [column, column + 32). Keys for which the row has no words have bit 0.
  FLASHJIT_FN u32 bits_from(int row, int column) const {
    if (row >= tree.rows) return 0;
    const u32* const of_row = words + row * tree.row_stride;
    const int word = column / 32, shift = column % 32;
    const u32 low = word < tree.words_per_row ? of_row[word] : 0;
    const u32 high = word + 1 < tree.words_per_row ? of_row[word + 1] : 0;
    return shift == 0 ? low : low >> shift | high << (32 - shift);
  }
};

}  // namespace flashjit::device
