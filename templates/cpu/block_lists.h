// make_block_lists on CPUs, in two steps: find what each block keeps, by ranges and where they do not tell by
// every pair; write the lists, and bitmasks of blocks that are kept in part.
#pragma once

#include "cpu/formula.h"
#include "shared/block_lists.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct BlockListsCpuSpec {
  static constexpr bool varlen = false;
};

template <class Spec>
class BlockListsCpu {
  using List = BlockList<Spec>;
  using Masks = typename List::Masks;

 public:
  // Items are lists.
  FLASHJIT_FN static void find(const BlockListsParams& p, i64 begin, i64 end) {
    for (i64 item = begin; item < end; ++item) {
      const List list(p, item / p.row_blocks, static_cast<int>(item % p.row_blocks));
      const Problem problem = list.problem();
      const Masks masks(p, problem);
      const Span rows = list.rows(problem);
      ListCounts count = {0, 0};
      for (int block = 0; block < p.key_blocks; ++block) {
        const Span keys = List::keys(problem, block);
        Maybe pairs = {false, true};
        if (!rows.empty() && !keys.empty()) pairs = known_pairs(masks, rows, keys);
        if (pairs.can_hold && pairs.can_fail) pairs = test_pairs(masks, rows, keys);
        list.found(block) = kept_of(pairs);
        count.blocks += pairs.can_hold;
        count.partial += pairs.can_hold && pairs.can_fail;
      }
      list.counts()[list.row_block] = count;
    }
  }

  // Items are the ends of lists: one more than the lists of each group.
  FLASHJIT_FN static void write(const BlockListsParams& p, i64 begin, i64 end) {
    for (i64 item = begin; item < end; ++item) {
      const List list(p, item / (p.row_blocks + 1), static_cast<int>(item % (p.row_blocks + 1)));
      int place = list.first_place(), partial = 0;
      for (int other = 0; other < list.row_block; ++other) {
        place += list.counts()[other].blocks;
        partial += list.counts()[other].partial;
      }
      list.set_offset(place);
      if (list.row_block == p.row_blocks) continue;
      const Problem problem = list.problem();
      const Masks masks(p, problem);
      for (int block = 0; block < p.key_blocks; ++block) {
        const Keeps keeps = list.found(block);
        if (keeps == Keeps::nothing) continue;
        list.set_block(place++, block, keeps, partial);
        if (keeps == Keeps::all) continue;
        if (partial < p.group_bitmasks)
          write_bits(list, masks, list.rows(problem), List::keys(problem, block), list.bitmask(partial));
        ++partial;
      }
    }
  }

 private:
  // Rows and keys beyond a sequence's end have no bits.
  __attribute__((noinline)) static void write_bits(const List& list, const Masks& masks, Span rows, Span keys,
                                                   int bitmask) {
    for (int row = 0; row < List::Lists::block_m; ++row) {
      u32* const words = list.words_of_row(bitmask, row);
      for (int i = 0; i < List::Lists::words_per_row; ++i) words[i] = 0;
      if (rows.begin + row >= rows.end) continue;
      const RowTest<Masks> test(masks, rows.begin + row);
      for (int i = 0; i < keys.size(); ++i) words[i / 32] |= static_cast<u32>(test(keys.begin + i)) << i % 32;
    }
  }
  __attribute__((noinline)) static Maybe test_pairs(const Masks& masks, Span rows, Span keys) {
    Maybe pairs = {false, false};
    for (int first = 0; first < test_stride; ++first)
      for (int row = rows.begin + first; row < rows.end && !(pairs.can_hold && pairs.can_fail);
           row += test_stride) {
        const RowTest<Masks> test(masks, row);
        for (int key = keys.begin; key < keys.end; ++key) {
          const bool kept = test(key);
          pairs.can_hold |= kept;
          pairs.can_fail |= !kept;
        }
      }
    return pairs;
  }
};

}  // namespace flashjit::device
