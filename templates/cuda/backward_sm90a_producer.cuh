// The producer's warpgroup of sm_90a's backward: a thread copies tiles, a warp provides the numbers of their
// rows, and a thread for each consumer adds its dQ to the sums.
#pragma once

#include "cuda/backward_sm90a_order.cuh"
#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/ptx_reduce.cuh"
#include "cuda/row_bits.cuh"
#include "cuda/row_walk.cuh"
#include "shared/backward_cuda_params.h"
#include "shared/dropout.h"

namespace flashjit::device {

template <class Kernel>
struct Sm90aBackwardProducer {
  using Spec = typename Kernel::Spec;
  using Mask = typename Kernel::Mask;
  using Work = typename Kernel::Work;
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  static constexpr auto layout = Kernel::layout;
  static constexpr int block_m = Kernel::block_m, stages = Kernel::stages;
  static constexpr int k_panels = Kernel::k_panels, v_panels = Kernel::v_panels;

  // Copies K and V of each place, and every block of Q and dO that may see the keys. With rows_first, the
  // first of these come before K and V, whose memory is free only when the place before has ended. That takes
  // registers, and pays with block lists.
  static FLASHJIT_FN void copy(const CudaBackwardParams& p, const BackwardMaps& maps, const Shared& shared) {
    Step step;
    u32 keys_parity = 0, turn = Kernel::first_turn(shared);
    [[maybe_unused]] bool first = true;
#pragma unroll 1
    while (Kernel::has_place(p, turn)) {
      bool has_keys = false;
      const auto copy_keys_once = [&] {
        if (!has_keys) copy_keys(p, maps, shared, turn, keys_parity);
        has_keys = true;
      };
      constexpr bool rows_first = Kernel::has_places && Kernel::needs_most;
      if (!rows_first || first) copy_keys_once();
      first = false;
#pragma unroll 1
      for (int i = Work(p, turn).keys.empty() ? p.place_group : 0; i < p.place_group; ++i) {
        // Hides the value's origin, so that nothing that depends on it is kept for the next head.
        u32 here = turn;
        asm volatile("" : "+r"(here));
        const Work work(p, here);
        const int batch = batch_of_maps(work);
        const Problem problem = work.of_head(work.problem.head_q + i);
        const Mask mask(p, problem);
        auto walk = [&] {
          if constexpr (has_row_bits<Mask>)
            return RowBitsWalk(row_bits<Spec>(p, problem, work.keys.begin), p.row_words);
          else
            return RowWalk<Mask, block_m, Kernel::orders_dq ? RowOrder::down : RowOrder::apart>(
                mask, work.keys,
                Kernel::has_places ? Kernel::Turns::rows_of_head(p, work.head) : Span{0, 0x7fffffff});
        }();
#pragma unroll 1
        for (Block block; walk.next(block);) {
          const int stage = step.stage(), row = problem.first_q + block.index * block_m;
          wait_for_q_buffer(shared, step);
          ask(shared, stage,
              BackwardMessage::block_word(block.index,
                                          block.whole && work.keys.begin + Kernel::block_n == work.keys.end),
              problem.head_q);
          mbarrier_arrive_expect_tx(shared.q_full(stage), layout.q_bytes);
          copy_tile<k_panels, block_m>(shared.q(stage), maps.q, shared.q_full(stage), row, problem.head_q,
                                       batch);
          wait_for_do_buffer(shared, step);
          mbarrier_arrive_expect_tx(shared.do_full(stage), layout.do_bytes);
          copy_tile<v_panels, block_m>(shared.d_o(stage), maps.d_o, shared.do_full(stage), row,
                                       problem.head_q, batch);
          ++step.count;
          if constexpr (rows_first) copy_keys_once();
        }
      }
      if constexpr (rows_first) copy_keys_once();
      turn = end_turn(p, shared, step);
      if constexpr (!Kernel::has_places) return;
      ++step.count;
    }
    if constexpr (Kernel::finishes_dq)
#pragma unroll 1
      for (; turn != no_turn; ++step.count) turn = end_turn(p, shared, step);
  }

  // A warp: copies lse and delta of a block's rows and makes dropout's words, while its Q arrives.
  static FLASHJIT_FN void add_rows(const CudaBackwardParams& p, const Shared& shared) {
    // The step before makes lse and delta. Without blocks, too: a kernel must not end before the one that it
    // follows.
    griddepcontrol_wait();
    Ring ring;
    int next = 0;
    u32 turn = Kernel::first_turn(shared);
#pragma unroll 1
    for (; Kernel::has_place(p, turn); ring.advance()) {
      const Work work(p, turn);
      const u32 first =
          static_cast<u32>(p.first_row(work.problem.batch, work.problem.first_q, Spec::varlen) / place_rows);
      while (add_rows_of_block(p, shared, ring.stage, ring.parity, work.problem.batch, first, next))
        ring.advance();
      end_turn(p, shared, ring, turn, next);
      if constexpr (!Kernel::has_places) return;
      turn = static_cast<u32>(next);
    }
    if constexpr (Kernel::finishes_dq)
#pragma unroll 1
      for (; turn != no_turn; ring.advance()) {
        mbarrier_wait(shared.asked(ring.stage), ring.parity);
        next = shared.read_message(ring.stage).second;
        __syncwarp();  // all have read it
        end_turn(p, shared, ring, turn, next);
        turn = static_cast<u32>(next);
      }
  }

  // One thread: adds a consumer's dQ to the sums of its rows, and says when a place's is complete.
  static FLASHJIT_FN void add_dq(const CudaBackwardParams& p, const Shared& shared, int consumer) {
    griddepcontrol_wait();  // the step before zeroes the sums
    constexpr int row_floats = cuda_backward_row(Spec::head_dim);
    constexpr Sm90aBackwardLayout parts = layout;  // device memory has no place for a static member
    float* const sums = p.dq_sums + (layout.divides_rows ? consumer * 64 * row_floats : 0);
    [[maybe_unused]] DqOrder<Kernel> order(p, consumer);
    for (u32 parity = 0;;) {
      u32 message[4];
#pragma unroll
      for (int part = 0; part < layout.dq_parts; ++part) {
        mbarrier_wait(shared.dq_full(consumer), parity);
        parity ^= 1;
        ld_shared_v4(message, shared.message(stages + consumer));
        if (static_cast<int>(message[0]) == no_more_blocks) break;
        const auto end_place = [&] {
          cp_async_bulk_wait_group();
          typename Kernel::Turns(p).end_place(message[1], 4);
        };
        if (static_cast<int>(message[0]) == no_dq) {
          if (part == 0) end_place();
          mbarrier_arrive(shared.dq_empty(consumer));
          continue;
        }
        if constexpr (Kernel::orders_dq)
          if (part == 0) order.wait_for(message[1], message[2]);
        const int columns = parts.dq_part_columns(part), first = parts.dq_first_column(part, consumer);
        float* const to = sums + static_cast<i64>(message[2]) * (place_rows * row_floats) + first * 16;
        // The bytes of 16 rows. The product of the last columns may be wider than the sums.
        const int bytes = min(columns, row_floats - first) * (16 * 4);
        if (bytes > 0)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            cp_reduce_async_bulk_add(to + i * (16 * row_floats), shared.dq(consumer) + i * (columns * 16 * 4),
                                     bytes);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read();
        mbarrier_arrive(shared.dq_empty(consumer));
        if constexpr (Kernel::orders_dq)
          if (part == layout.dq_parts - 1) order.end(message[2]);
        if (static_cast<int>(message[0]) == last_dq) end_place();
      }
      if (static_cast<int>(message[0]) == no_more_blocks) break;
    }
    if constexpr (!Kernel::finishes_dq) cp_async_bulk_wait_group();
  }
  // One thread, where a consumer's threads add their own dQ: says when the rows' turn has come. The message
  // that asks for the next rows says that the ones before have been added.
  static FLASHJIT_FN void order_dq(const CudaBackwardParams& p, const Shared& shared, int consumer) {
    griddepcontrol_wait();  // the step before zeroes the counters
    DqOrder<Kernel> order(p, consumer);
    u32 message[4], rows = 0;
    for (u32 step = 0;; ++step) {
      mbarrier_wait(shared.dq_full(consumer), step & 1);
      ld_shared_v4(message, shared.message(stages + consumer));
      if (step > 0) order.end(rows);
      if (static_cast<int>(message[0]) == no_more_blocks) return;
      rows = message[2];
      order.wait_for(message[1], rows);
      mbarrier_arrive(shared.dq_empty(consumer));
    }
  }

 private:
  // Packed tensors are one batch entry.
  static FLASHJIT_FN int batch_of_maps(const Work& work) { return Spec::varlen ? 0 : work.problem.batch; }
  static FLASHJIT_FN void copy_keys(const CudaBackwardParams& p, const BackwardMaps& maps,
                                    const Shared& shared, u32 place, u32& parity) {
    const Work work(p, place);
    if (work.keys.empty()) return;
    const int batch = batch_of_maps(work), key = work.problem.first_k + work.keys.begin;
    mbarrier_wait(shared.keys_empty(), parity ^ 1);
    parity ^= 1;
    mbarrier_arrive_expect_tx(shared.k_full(), layout.k_bytes);
    copy_tile<k_panels, Kernel::block_n>(shared.k(), maps.k, shared.k_full(), key, work.problem.head_kv,
                                         batch);
    if constexpr (Kernel::makes_dk) {
      mbarrier_arrive_expect_tx(shared.v_full(), layout.v_bytes);
      copy_tile<v_panels, Kernel::block_n>(shared.v(), maps.v, shared.v_full(), key, work.problem.head_kv,
                                           batch);
    }
  }
  // The position in the stages, as one number, because registers are few.
  struct Step {
    u32 count = 0;
    FLASHJIT_FN int stage() const { return static_cast<int>(count % stages); }
    FLASHJIT_FN u32 parity() const { return count / stages % 2; }
    FLASHJIT_FN Step before() const { return {count - 1}; }
  };
  // Says that a turn has no more rows, and which one is next.
  static FLASHJIT_FN u32 end_turn(const CudaBackwardParams& p, const Shared& shared, Step step) {
    const u32 next = Kernel::has_places ? Kernel::take_turn(p) : 0;
    mbarrier_wait(shared.q_empty(step.stage()), step.parity() ^ 1);
    ask(shared, step.stage(), no_more_blocks, static_cast<int>(next));
    if constexpr (Kernel::has_places) {
      // The phases of dO keep pace with those of Q.
      mbarrier_wait(shared.do_empty(step.stage()), step.parity() ^ 1);
      mbarrier_arrive(shared.do_full(step.stage()));
    }
    mbarrier_arrive(shared.q_full(step.stage()));
    return next;
  }
  // Where buffers rotate, Q comes where the step before had dO, and dO where it had Q.
  static FLASHJIT_FN void wait_for_q_buffer(const Shared& shared, Step step) {
    if constexpr (layout.rotates)
      mbarrier_wait(shared.do_empty(step.before().stage()), step.before().parity());
    else
      mbarrier_wait(shared.q_empty(step.stage()), step.parity() ^ 1);
  }
  static FLASHJIT_FN void wait_for_do_buffer(const Shared& shared, Step step) {
    if constexpr (layout.rotates)
      mbarrier_wait(shared.q_empty(step.before().stage()), step.before().parity());
    else
      mbarrier_wait(shared.do_empty(step.stage()), step.parity() ^ 1);
  }
  // Adds the rows of dQ that the turn has to its last message, and lets the consumers have them once their
  // sums are complete.
  static FLASHJIT_FN void end_turn(const CudaBackwardParams& p, const Shared& shared, const Ring& ring,
                                   u32 turn, int next) {
    if (threadIdx.x % 32 == 0) {
      if constexpr (Kernel::finishes_dq) {
        const typename Kernel::Turns turns(p);
        const auto rows = turns.rows_of(turn);
        st_shared_v4(shared.message(ring.stage), static_cast<u32>(~((rows.end - rows.begin) / 16)),
                     static_cast<u32>(next), rows.head, static_cast<u32>(rows.begin));
        turns.wait_for(rows);
      }
      mbarrier_arrive(shared.numbers_full(ring.stage));
    }
    __syncwarp();
  }
  // first: where the batch entry's rows begin, in units of place_rows. Returns false after a place's last
  // block, whose message has the next turn.
  static FLASHJIT_FN bool add_rows_of_block(const CudaBackwardParams& p, const Shared& shared, int stage,
                                            u32 parity, int batch, u32 first, int& next) {
    const int lane = threadIdx.x % 32;
    mbarrier_wait(shared.asked(stage), parity);
    int word, head;
    ld_shared_v2(word, head, shared.message(stage));
    if (word < 0) {
      next = head;
      __syncwarp();  // all have read it
      return false;
    }
    if (lane == 0) {
      const u32 place = static_cast<u32>(head) * (static_cast<u32>(p.rows) / place_rows) + first +
                        static_cast<u32>(BackwardMessage::index_of(word) * (block_m / place_rows));
      st_shared(shared.message(stage) + 8, place);
      const u32 full = shared.numbers_full(stage);
      mbarrier_expect_tx(full, block_m * 4 * (1 + Kernel::makes_dk + Kernel::differentiates));
      const auto copy_numbers = [&](u32 to, const float* from) {
        cp_async_bulk(to, from + static_cast<i64>(place) * place_rows, block_m * 4, full);
      };
      copy_numbers(shared.lse(stage), p.lse_log2);
      if constexpr (Kernel::makes_dk) copy_numbers(shared.delta(stage), p.delta);
      if constexpr (Kernel::differentiates) copy_numbers(shared.far_max(stage), p.far_max);
    }
    if constexpr (Spec::dropout) {
      // Read the message and the key each time: registers are few, and ten rounds of the key would fill them.
#pragma unroll 1
      for (int i = lane; i < block_m; i += 32) {
        ld_shared_v2(word, head, shared.message(stage));
        const RowWords words = row_words_at<typename Spec::Offsets, true>(
            p, shared.dropout_key(), BackwardMessage::index_of(word) * block_m + i, head, batch);
        st_shared_v2(shared.words(stage) + i * 8, words.multiplier, words.addend);
      }
    }
    __syncwarp();
    if (lane == 0) {
      if constexpr (!Kernel::differentiates) mark_far(p, shared.message(stage));
      mbarrier_arrive(shared.numbers_full(stage));
    }
    return true;
  }
  // Reads the message once more, so that no register holds it meanwhile.
  static FLASHJIT_FN void mark_far(const CudaBackwardParams& p, u32 message) {
    int word, head, place, rest;
    ld_shared_v2(place, rest, message + 8);
    if (far_marks<block_m>(p, static_cast<i64>(place) * place_rows) == 0) return;
    ld_shared_v2(word, head, message);
    st_shared(message, static_cast<u32>(BackwardMessage::far_word(word)));
  }
  // Sends the message about a block and asks for its rows' numbers.
  static FLASHJIT_FN void ask(const Shared& shared, int stage, int word, int head) {
    st_shared_v2(shared.message(stage), static_cast<u32>(word), static_cast<u32>(head));
    mbarrier_arrive(shared.asked(stage));
  }
};

}  // namespace flashjit::device
