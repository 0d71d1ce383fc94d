// make_block_lists: two kernels make lists of blocks from masks. A block of the first one's grid finds what
// each block of a list keeps: by ranges, a lane for each, and where they do not tell by every pair. A warp of
// the second one writes a list.
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
  // Blocks that a warp looks at together. Few: most of the time goes into those that take every pair.
  static constexpr int group = 8;
  static constexpr u32 all_lanes = 0xffffffff;

 public:
  // of_warps: an integer in shared memory for each warp.
  FLASHJIT_FN static void find(const BlockListsParams& p, int* of_warps) {
    griddepcontrol_launch_dependents();
    if (ctaid_x() >= p.groups * p.row_blocks) return;
    const u32 row_blocks = static_cast<u32>(p.row_blocks), group_of_lists = ctaid_x() / row_blocks;
    const List list(p, group_of_lists, static_cast<int>(ctaid_x() - group_of_lists * row_blocks));
    const Problem problem = list.problem();
    const Masks masks(p, problem);
    const Span rows = list.rows(problem);
    const int lane = static_cast<int>(tid_x() % 32), warp = static_cast<int>(tid_x() / 32);
    int count = 0;
    for (int first = warp * group; first < p.key_blocks; first += warps * group) {
      const int block = first + lane;
      const bool mine = lane < group && block < p.key_blocks;
      const Span keys = List::keys(problem, block);
      Maybe pairs = {false, true};
      if (mine && !rows.empty() && !keys.empty()) pairs = known_pairs(masks, rows, keys);
      for (u32 open = __ballot_sync(all_lanes, pairs.can_hold && pairs.can_fail); open; open &= open - 1) {
        const int other = __ffs(static_cast<int>(open)) - 1;
        const Maybe tested = test_pairs(masks, rows, List::keys(problem, first + other), lane);
        if (lane == other) pairs = tested;
      }
      if (mine) list.found(block) = kept_of(pairs);
      count += __popc(__ballot_sync(all_lanes, mine && pairs.can_hold));
    }
    if (lane == 0) of_warps[warp] = count;
    __syncthreads();
    if (tid_x() != 0) return;
    for (int other = 1; other < warps; ++other) count += of_warps[other];
    list.counts()[list.row_block] = count;
  }

  FLASHJIT_FN static void write(const BlockListsParams& p) {
    griddepcontrol_wait();
    const int lane = static_cast<int>(tid_x() % 32);
    const i64 warp = i64{ctaid_x()} * warps + tid_x() / 32, group_of_lists = warp / (p.row_blocks + 1);
    if (group_of_lists >= p.groups) return;
    const List list(p, group_of_lists, static_cast<int>(warp % (p.row_blocks + 1)));
    int before = 0;
    for (int other = lane; other < list.row_block; other += 32) before += list.counts()[other];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      before += __shfl_xor_sync(all_lanes, before, distance);
    int place = list.first_place() + before;
    if (lane == 0) list.set_offset(place);
    if (list.row_block == p.row_blocks) return;
    for (int first = 0; first < p.key_blocks; first += 32) {
      const int block = first + lane;
      const Keeps keeps = block < p.key_blocks ? list.found(block) : Keeps::nothing;
      const u32 listed = __ballot_sync(all_lanes, keeps != Keeps::nothing);
      if (keeps != Keeps::nothing) list.set_block(place + __popc(listed & low_bits(lane)), block, keeps);
      place += __popc(listed);
    }
  }

 private:
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
  BlockListsCuda<Spec, Config>::find(params, reinterpret_cast<int*>(dynamic_shared));
}
template <class Spec, class Config>
FLASHJIT_FN void write_blocks(const BlockListsParams& params) {
  BlockListsCuda<Spec, Config>::write(params);
}

}  // namespace flashjit::device
