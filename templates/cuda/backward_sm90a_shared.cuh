// A block's shared memory in sm_90a's backward, as addresses.
#pragma once

#include "cuda/backward_sm90a_parts.cuh"
#include "shared/dropout.h"

namespace flashjit::device {

template <class Kernel>
struct Sm90aBackwardShared {
  static constexpr Sm90aBackwardLayout layout = Kernel::layout;
  static constexpr int block_m = Kernel::block_m, stages = Kernel::stages, consumers = Kernel::consumers;

  const char* memory;
  u32 start;
  FLASHJIT_FN u32 k() const { return start + layout.k; }
  FLASHJIT_FN u32 v() const { return start + layout.v; }
  FLASHJIT_FN u32 q(int stage) const {
    return start + layout.q + stage * (layout.rotates ? layout.buffer_bytes : layout.q_bytes);
  }
  FLASHJIT_FN u32 d_o(int stage) const {
    return layout.rotates ? q(stage ^ 1) : start + layout.d_o + stage * layout.do_bytes;
  }
  FLASHJIT_FN u32 ds(int buffer) const { return start + layout.ds + buffer * layout.ds_bytes; }
  FLASHJIT_FN u32 dq(int consumer) const { return start + layout.dq + consumer * layout.dq_bytes; }
  FLASHJIT_FN u32 lse(int stage) const { return start + layout.lse + stage * (block_m * 4); }
  FLASHJIT_FN u32 delta(int stage) const { return start + layout.delta + stage * (block_m * 4); }
  FLASHJIT_FN u32 far_max(int stage) const { return start + layout.far_max + stage * (block_m * 4); }
  FLASHJIT_FN u32 words(int stage) const { return start + layout.words + stage * (block_m * 8); }
  // i: a stage, or stages + the consumer whose dQ it is.
  FLASHJIT_FN u32 message(int i) const { return start + layout.messages + i * layout.message_bytes; }
  FLASHJIT_FN BackwardMessage read_message(int i) const {
    return reinterpret_cast<const BackwardMessage*>(memory + layout.messages)[i];
  }
  FLASHJIT_FN u32 first_turn() const { return start + layout.first_turn; }
  FLASHJIT_FN u32 read_first_turn() const {
    return *reinterpret_cast<const u32*>(memory + layout.first_turn);
  }
  FLASHJIT_FN Words dropout_key() const {
    return *reinterpret_cast<const Words*>(memory + layout.dropout_key);
  }
  // mbarriers. "full" expects an arrival of each thread that copies and the bytes, "empty" one of every
  // consumer warp; of dQ, which consumers fill, it is the other way round.
  FLASHJIT_FN u32 barrier(int i) const { return start + layout.barriers + i * layout.barrier_bytes; }
  FLASHJIT_FN u32 k_full() const { return barrier(0); }
  FLASHJIT_FN u32 v_full() const { return barrier(1); }
  FLASHJIT_FN u32 keys_empty() const { return barrier(2); }  // K and V
  FLASHJIT_FN u32 q_full(int stage) const { return barrier(3 + 6 * stage); }
  FLASHJIT_FN u32 q_empty(int stage) const { return barrier(4 + 6 * stage); }
  FLASHJIT_FN u32 do_full(int stage) const { return barrier(5 + 6 * stage); }
  FLASHJIT_FN u32 do_empty(int stage) const { return barrier(6 + 6 * stage); }
  FLASHJIT_FN u32 asked(int stage) const { return barrier(7 + 6 * stage); }
  // Of the rows' numbers: lse, delta, far_max, dropout's words, and the rest of the message. No product waits
  // for them.
  FLASHJIT_FN u32 numbers_full(int stage) const { return barrier(8 + 6 * stage); }
  FLASHJIT_FN u32 dq_full(int consumer) const { return barrier(3 + 6 * stages + 2 * consumer); }
  FLASHJIT_FN u32 dq_empty(int consumer) const { return barrier(4 + 6 * stages + 2 * consumer); }
  FLASHJIT_FN u32 ds_full(int buffer) const { return barrier(3 + 6 * stages + 2 * consumers + buffer); }
};

}  // namespace flashjit::device
