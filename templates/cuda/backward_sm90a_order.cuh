// A fixed order in which blocks of sm_90a's grid add to the same rows of dQ, so that its bits are equal run
// after run: a row's first keys come first. Places of a head are taken in the order of their keys and walk
// rows downwards, from the last that see the keys. So where one place has come to, the place before it has
// mostly been, and no place waits for one that no block has taken yet.
#pragma once

#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/ptx_sm90a_bulk.cuh"
#include "cuda/row_walk.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

// Of a thread for each consumer, which adds its dQ or tells it when to. The rows that see a block of keys are
// an interval that moves on with the keys, so a place waits for the place before it, or, where that one has
// no such rows, for none.
template <class Kernel>
class DqOrder {
  using Spec = typename Kernel::Spec;
  using Mask = typename Kernel::Mask;
  using Work = typename Kernel::Work;
  static constexpr int block_m = Kernel::block_m, block_n = Kernel::block_n;

 public:
  FLASHJIT_FN DqOrder(const CudaBackwardParams& p, int consumer)
      : p_(p), blocks_added_(p.dq_blocks_added + consumer) {}

  // Waits until the keys before those of the place have been added to a block of rows, which is given by its
  // place in the workspace.
  FLASHJIT_FN void wait_for(u32 place, u32 rows) {
    if (place != place_) begin(place);
    if (rows % static_cast<u32>(p_.rows / place_rows) - before_first_ >= before_count_) return;
    ld_acquire_wait(count_of(rows), key_block_);
    // What is acquired here orders a copy that another unit makes.
    if constexpr (Kernel::layout.stages_dq) fence_proxy_async_global();
  }
  // Says that the place's keys have been added to the rows.
  FLASHJIT_FN void end(u32 rows) const {
    if constexpr (Kernel::layout.stages_dq) {
      cp_async_bulk_wait_group();
      fence_proxy_async_global();
    }
    st_release(count_of(rows), key_block_ + 1);
  }

 private:
  FLASHJIT_FN u32* count_of(u32 rows) const {
    return blocks_added_ + static_cast<i64>(rows) * Kernel::consumers;
  }
  FLASHJIT_FN void begin(u32 place) {
    place_ = place;
    // Hides the value's origin: else parts of what follows are computed before the loop, and fill registers.
    asm volatile("" : "+r"(place));
    const Work work(p_, place);
    const Problem& problem = work.problem;
    key_block_ = static_cast<u32>(work.keys.begin / block_n);
    before_count_ = 0;
    if (key_block_ == 0) return;
    constexpr int units = block_m / place_rows;
    const Mask mask(p_, problem);
    const RowWalk<Mask, block_m, RowOrder::down> walk(mask, {work.keys.begin - block_n, work.keys.begin});
    before_first_ =
        static_cast<u32>(p_.first_row(problem.batch, problem.first_q, Spec::varlen) / place_rows) +
        static_cast<u32>(walk.first() * units);
    before_count_ = static_cast<u32>(walk.count() * units);
  }

  const CudaBackwardParams& p_;
  u32* const blocks_added_;
  u32 place_ = no_turn, key_block_ = 0;
  // Rows that the place before has, in each head that it walks, as places in the workspace.
  u32 before_first_ = 0, before_count_ = 0;
};

}  // namespace flashjit::device
