// make_block_lists: two kernels make lists of blocks from masks. A block of the first one's grid finds what
// each block of a list keeps: by ranges, a lane for each, and where they do not tell by every pair. A block
// of the second one's grid writes a list. It shares the bitmasks of blocks that are kept in part with others.
#pragma once

#include "cuda/ptx_sync.cuh"
#include "shared/block_lists.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct BlockListsCudaSpec {
  static constexpr bool varlen = false;
};

template <class Spec, class Config>
class BlockListsCuda {
  using List = BlockList<Spec>;
  using Masks = typename List::Masks;
  static constexpr int warps = Config::num_warps, block_n = List::Lists::block_n;
  // Blocks that a warp looks at together: few, and none beside another. Most of the time goes into blocks
  // whose pairs are tested one by one, and these lie beside each other.
  static constexpr int group = 8;
  static constexpr u32 all_lanes = 0xffffffff;

 public:
  // of_warps: the counts of each warp, in shared memory.
  FLASHJIT_FN static void find(const BlockListsParams& p, ListCounts* of_warps) {
    griddepcontrol_launch_dependents();
    if (ctaid_x() >= p.groups * p.row_blocks) return;
    const u32 row_blocks = static_cast<u32>(p.row_blocks), group_of_lists = ctaid_x() / row_blocks;
    const List list(p, group_of_lists, static_cast<int>(ctaid_x() - group_of_lists * row_blocks));
    const Problem problem = list.problem();
    const Masks masks(p, problem);
    const Span rows = list.rows(problem);
    const int lane = static_cast<int>(tid_x() % 32), warp = static_cast<int>(tid_x() / 32);
    ListCounts count = {0, 0};
    for (int first = 0; first < p.key_blocks; first += warps * group) {
      const int block = first + lane * warps + warp;
      const bool mine = lane < group && block < p.key_blocks;
      const Span keys = List::keys(problem, block);
      Maybe pairs = {false, true};
      if (mine && !rows.empty() && !keys.empty()) pairs = known_pairs(masks, rows, keys);
      for (u32 open = __ballot_sync(all_lanes, pairs.can_hold && pairs.can_fail); open; open &= open - 1) {
        const int other = __ffs(static_cast<int>(open)) - 1;
        const Maybe tested = test_pairs(masks, rows, List::keys(problem, first + other * warps + warp), lane);
        if (lane == other) pairs = tested;
      }
      if (mine) list.found(block) = kept_of(pairs);
      count.blocks += __popc(__ballot_sync(all_lanes, mine && pairs.can_hold));
      count.partial += __popc(__ballot_sync(all_lanes, mine && pairs.can_hold && pairs.can_fail));
    }
    if (lane == 0) of_warps[warp] = count;
    __syncthreads();
    if (tid_x() != 0) return;
    for (int other = 1; other < warps; ++other) {
      count.blocks += of_warps[other].blocks;
      count.partial += of_warps[other].partial;
    }
    list.counts()[list.row_block] = count;
  }

  // Grid.y: the blocks of the grid that write a list.
  FLASHJIT_FN static void write(const BlockListsParams& p) {
    griddepcontrol_wait();
    const u32 lists = static_cast<u32>(p.row_blocks) + 1, group_of_lists = ctaid_x() / lists;
    if (group_of_lists >= p.groups) return;
    const List list(p, group_of_lists, static_cast<int>(ctaid_x() % lists));
    const int lane = static_cast<int>(tid_x() % 32);
    const int warp = static_cast<int>(ctaid_y() * block_lists_write_warps + tid_x() / 32);  // of the list
    // The counts of the group's lists before this one.
    int blocks = 0, partial = 0;
    for (int other = lane; other < list.row_block; other += 32) {
      blocks += list.counts()[other].blocks;
      partial += list.counts()[other].partial;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      blocks += __shfl_xor_sync(all_lanes, blocks, distance);
      partial += __shfl_xor_sync(all_lanes, partial, distance);
    }
    int place = list.first_place() + blocks;
    if (warp == 0 && lane == 0) list.set_offset(place);
    if (list.row_block == p.row_blocks || (warp > 0 && partial >= p.group_bitmasks)) return;
    const Problem problem = list.problem();
    const Masks masks(p, problem);
    const Span rows = list.rows(problem);
    for (int first = 0; first < p.key_blocks; first += 32) {
      const int block = first + lane;
      const Keeps keeps = block < p.key_blocks ? list.found(block) : Keeps::nothing;
      const u32 listed = __ballot_sync(all_lanes, keeps != Keeps::nothing);
      const u32 in_part = __ballot_sync(all_lanes, keeps == Keeps::some), before = low_bits(lane);
      if (warp == 0 && keeps != Keeps::nothing)
        list.set_block(place + __popc(listed & before), block, keeps, partial + __popc(in_part & before));
      place += __popc(listed);
      for (u32 open = in_part; open && partial < p.group_bitmasks; open &= open - 1, ++partial) {
        const Span keys = List::keys(problem, first + __ffs(static_cast<int>(open)) - 1);
        write_bits(list, masks, rows, keys, list.bitmask(partial), warp, lane);
      }
    }
  }

 private:
  // Every warp of the list writes some rows of a block's bitmask, a few at once: their loads do not wait for
  // votes. Rows and keys beyond a sequence's end have no bits.
  FLASHJIT_FN static void write_bits(const List& list, const Masks& masks, Span rows, Span keys, int bitmask,
                                     int warp, int lane) {
    constexpr int block_m = List::Lists::block_m, words_per_row = List::Lists::words_per_row, at_once = 4;
    static_assert(block_m % at_once == 0 && at_once * words_per_row <= 32);
    const int stride = static_cast<int>(nctaid_y()) * block_lists_write_warps * at_once;
    for (int first = warp * at_once; first < block_m; first += stride) {
      u32 kept = 0;
#pragma unroll
      for (int r = 0; r < at_once; ++r) {
        const int row = rows.begin + first + r;
        const RowTest<Masks> test(masks, min(row, rows.end - 1));
#pragma unroll
        for (int i = 0; i < words_per_row; ++i) {
          const int key = keys.begin + i * 32 + lane;
          const bool keeps = test(min(key, keys.end - 1));  // also of a key that does not exist: no branch
          kept |= (keeps && row < rows.end && key < keys.end ? 1u : 0u) << (r * words_per_row + i);
        }
      }
      u32 word = 0;
#pragma unroll
      for (int i = 0; i < at_once * words_per_row; ++i) {
        const u32 bits = __ballot_sync(all_lanes, kept >> i & 1);
        if (lane == i) word = bits;
      }
      if (lane < at_once * words_per_row) list.words_of_row(bitmask, first)[lane] = word;
    }
  }
  FLASHJIT_FN static Maybe test_pairs(const Masks& masks, Span rows, Span keys, int lane) {
    Maybe pairs = {false, false};
    for (int first = 0; first < test_stride; ++first) {
      for (int row = rows.begin + first; row < rows.end; row += test_stride) {
        const RowTest<Masks> test(masks, row);
#pragma unroll
        for (int i = 0; i < block_n; i += 32) {
          const bool kept = test(min(keys.begin + i + lane, keys.end - 1));  // the last key several times
          pairs.can_hold |= kept;
          pairs.can_fail |= !kept;
        }
      }
      if (__any_sync(all_lanes, pairs.can_hold) && __any_sync(all_lanes, pairs.can_fail)) break;
    }
    return {__any_sync(all_lanes, pairs.can_hold) != 0, __any_sync(all_lanes, pairs.can_fail) != 0};
  }
};

template <class Spec, class Config>
FLASHJIT_FN void find_blocks(const BlockListsParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  BlockListsCuda<Spec, Config>::find(params, reinterpret_cast<ListCounts*>(dynamic_shared));
}
template <class Spec, class Config>
FLASHJIT_FN void write_blocks(const BlockListsParams& params) {
  BlockListsCuda<Spec, Config>::write(params);
}

}  // namespace flashjit::device
