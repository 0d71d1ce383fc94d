// Blocks of sm_90a's persistent grid take turns, in order. A turn is a place, which is block_n keys of a
// head, then a share of dQ's rows, whose sums are complete and still in the second-level cache. A launch of
// its own for dQ would read them from memory.
//   turn        0 ...    lag ...       places ...
//   its place   turn     turn          none
//   its rows    none     those of the place `lag` turns ago; at the end, of the last `lag` places in parts
// A block that waits for the sums of its rows waits for turns that other blocks have taken before, so it
// never waits for a block that has not begun.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/row_walk.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

constexpr u32 no_turn = 0xffffffff;

// orders_dq: places of a head begin apart, so that none waits for long (backward_sm90a_order.cuh).
template <class Spec, int block_n, bool finishes_dq, bool orders_dq>
struct BackwardTurns {
  using Mask = typename Spec::Mask;
  using KeyBlock = device::KeyBlock<Mask, orders_dq || makes_work_differ<Mask>>;

  // Rows that the consumers' warps convert at once, 16 each.
  static constexpr int consumer_warps = block_n / 16, part_rows = consumer_warps * 16;

  const CudaBackwardParams& p;
  u32 blocks, heads, places;
  FLASHJIT_FN explicit BackwardTurns(const CudaBackwardParams& params)
      : p(params),
        blocks(static_cast<u32>(max(ceil_div(p.seqlen_k, block_n), 1))),
        heads(p.schedule_heads()),
        places(blocks * heads) {}

  FLASHJIT_FN u32 turns() const { return finishes_dq ? places + lag() * parts() : places; }

  // All places of a head are taken, and most probably done, so many turns after any of them.
  FLASHJIT_FN u32 lag() const {
    return min(min(KeyBlock::heads_of(p.section), heads) * blocks + 2 * gridDim.x, places);
  }
  // A place's share of its head's rows, and its parts in turns without a place.
  FLASHJIT_FN int rows() const {
    return round_up(ceil_div(min(p.seqlen_q, p.part_rows), static_cast<int>(blocks)), 16);
  }
  FLASHJIT_FN u32 parts() const { return static_cast<u32>(max(ceil_div(rows(), part_rows), 1)); }

  FLASHJIT_FN KeyBlock key_block(u32 place) const { return {place, blocks, heads, p.section}; }

  // The rows that a head of the schedule has: all, or a part of them.
  FLASHJIT_FN static Span rows_of_head(const CudaBackwardParams& p, u32 head) {
    if (p.row_parts == 1) return {0, 0x7fffffff};
    const int part = static_cast<int>(head % static_cast<u32>(p.row_parts));
    return {part * p.part_rows, (part + 1) * p.part_rows};
  }

  struct Rows {
    u32 head;        // of the schedule
    int begin, end;  // rows of each query head that has these places; empty: none
  };
  FLASHJIT_FN Rows rows_of(u32 turn) const {
    const u32 late = lag();
    if (!finishes_dq || turn < late) return {0, 0, 0};
    const u32 in_end = turn - min(turn, places), count = turn < places ? 1 : parts();
    const KeyBlock from = key_block(turn < places ? turn - late : places - late + in_end / count);
    const Span of_head = rows_of_head(p, from.head);
    const int first = of_head.begin + static_cast<int>(from.block) * rows(),
              end = min(first + rows(), of_head.end);
    const int begin = count == 1 ? first : first + static_cast<int>(in_end % count) * part_rows;
    return {from.head, begin, max(count == 1 ? end : min(begin + part_rows, end), begin)};
  }
  // Waits for the sums of rows.
  FLASHJIT_FN void wait_for(const Rows& rows) const {
    if (rows.begin < rows.end) ld_acquire_wait(p.places_done + rows.head, blocks * consumer_warps);
  }
  // Says that so many warps have added the last dQ of a place.
  FLASHJIT_FN void end_place(u32 place, u32 warps) const {
    red_add_release(p.places_done + key_block(place).head, warps);
  }
};

}  // namespace flashjit::device
