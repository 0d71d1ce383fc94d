// The backward for sm_90a, in FlashAttention-3's form (Shah et al., 2024). A block of the grid owns block_n
// keys of a key/value head: it walks the query blocks of all query heads of that head, so dK and dV are sums
// in registers. Scores are transposed,
//   S^T = K Q^T        dP^T = V dO^T
// so that P^T and dS^T, in registers, are the first operands of
//   dV += P^T dO       dK += dS^T Q
// Each consumer warpgroup owns 64 keys. dS goes through shared memory for dQ = dS K, which the copy engine
// adds to sums in global memory, in the order in which accumulators hold it. A later turn of a block puts it
// in order (backward_sm90a_turns.cuh). With wide heads no thread has the registers for dK and dV. There a
// block of the grid makes either of them, and another kernel puts dQ in order.
#pragma once

#include "cuda/backward_sm90a_gradients.cuh"
#include "cuda/backward_sm90a_mask.cuh"
#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_producer.cuh"
#include "cuda/backward_sm90a_shared.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/dropout.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

template <class Spec_, class Config_, BackwardSums sums>
struct BackwardSm90a {
  using Spec = Spec_;
  using Config = Config_;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Products = typename Config::Products;
  using Message = BackwardMessage;

  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr bool makes_dk = sums != BackwardSums::dv, makes_dv = sums != BackwardSums::dk;
  static constexpr bool makes_dq = makes_dk && !Spec::deterministic;
  static constexpr Sm90aBackwardLayout layout{Spec::head_dim,
                                              Spec::head_dim_v,
                                              block_m,
                                              block_n,
                                              makes_dk ? Config::num_stages : backward_dv_stages,
                                              Spec::dropout,
                                              Spec::deterministic,
                                              sums};
  static constexpr int stages = layout.stages;
  // Whether a block of the grid may have several places, and then writes dQ as well.
  static constexpr bool has_places = sums == BackwardSums::both, finishes_dq = has_places && makes_dq;
  using Turns = BackwardTurns<Spec, block_n, finishes_dq>;
  using Ring = Sm90aRing<stages>;
  static constexpr int consumers = layout.consumers, consumer_warps = 4 * consumers;
  static constexpr int k_panels = ceil_div(Spec::head_dim, layout.panel);
  static constexpr int v_panels = ceil_div(Spec::head_dim_v, layout.panel);
  // Weights and dS of a block's rows are made in tiles, which are all of them unless dK and dV leave too few
  // registers.
  static constexpr int tile_rows = layout.tile_rows, tiles = block_m / tile_rows;
  static constexpr int score_tiles = block_m / layout.score_rows;
  static constexpr int steps = tile_rows / 16;  // of the products over a tile's rows

  // setmaxnreg: consumers, which hold tiles, get most of a multiprocessor's 64 Ki registers. Where they need
  // all that there are, the thread that copies tiles spills some, which costs nothing: it waits most of the
  // time.
  static constexpr bool needs_most = tiles > 1 || (isolates_dropped<Mask> && block_m <= 64 &&
                                                   Spec::head_dim + Spec::head_dim_v > 224);
  static constexpr int producer_registers = needs_most ? 24 : 40, consumer_registers = needs_most ? 240 : 232;
  // A block has what its threads begin with. Waiting for more would never end.
  static_assert(producer_registers + consumers * consumer_registers <=
                (consumers + 1) * (65536 / ((consumers + 1) * 128) / 8 * 8));

  // clears_keys: also in K, which dQ's product reads.
  static constexpr bool isolates = isolates_dropped<Mask>, clears_keys = isolates && makes_dq;

  // Whether dQ of a block is computed during the step of the next one.
  static constexpr bool delays_dq = makes_dq && layout.ds_buffers > 2 && !(isolates && block_m > 64);
  using DsRing = Sm90aRing<layout.ds_buffers>;
  // Whether the second consumer begins a place later than the first, so that one computes weights during the
  // products of the other. With 64 rows, whose weights take less time, this is slower.
  static constexpr bool staggers = delays_dq && block_m > 64 && consumers == 2 && !ScoreGradient::changes;

  // Whether dV's product begins before dS is made: P is then held twice, in 16 bits and in 32.
  static constexpr bool early_dv =
      sums == BackwardSums::both && block_m <= 64 && tiles == 1 && !Spec::dropout && !ScoreGradient::changes;
  // Else weights are packed as soon as their dS is made, so that their registers are free.
  static constexpr bool packs_late = sums == BackwardSums::both && !early_dv && !ScoreGradient::changes;

  // Id of a named barrier, + consumer: its own four warps. 0 belongs to __syncthreads.
  static constexpr int warpgroup_barrier = 1;

  using Shared = Sm90aBackwardShared<BackwardSm90a>;

  // A place is block_n keys of a key/value head. Where one kernel makes all sums, the grid has a block for
  // each multiprocessor, which takes the next turn that is left, whose copies begin while the one before
  // ends. Else a block has one place.
  FLASHJIT_FN static u32 first_turn(const Shared& shared) {
    return has_places ? shared.read_first_turn() : blockIdx.x / 2;
  }
  // The step before makes the counter 0.
  FLASHJIT_FN static u32 take_turn(const CudaBackwardParams& p) {
    const u32 turn = atom_add(p.next_turn, 1);
    return turn < Turns(p).turns() ? turn : no_turn;
  }
  FLASHJIT_FN static bool has_place(const CudaBackwardParams& p, u32 turn) {
    return !has_places || turn < Turns(p).places;
  }

  // The first query head of a head with places of its own.
  template <bool padding>
  FLASHJIT_FN static Problem problem_of(const CudaBackwardParams& p, u32 head) {
    const u32 heads_of_entry = static_cast<u32>(p.place_heads);
    return make_problem<Spec::varlen, padding>(p, static_cast<int>(head / heads_of_entry),
                                               static_cast<int>(head % heads_of_entry) * p.place_group);
  }

  // A place's work.
  struct Work {
    Problem problem;  // with the first query head of the group
    Span keys;        // without padding
    int keys_end;     // with padding
    FLASHJIT_FN Work(const CudaBackwardParams& p, u32 place) {
      const KeyBlock<Mask> of_grid = Turns(p).key_block(place);
      const int block = static_cast<int>(of_grid.block);
      problem = problem_of<Mask::padding>(p, of_grid.head);
      const Problem slot = problem_of<false>(p, of_grid.head);
      keys = {block * block_n, min((block + 1) * block_n, problem.seqlen_k)};
      keys_end = min((block + 1) * block_n, slot.seqlen_k);
    }
    FLASHJIT_FN Problem of_head(int head_q) const {
      Problem r = problem;
      r.head_q = head_q;
      return r;
    }
  };
  using Producer = Sm90aBackwardProducer<BackwardSm90a>;
  using Gradients = Sm90aBackwardGradients<BackwardSm90a>;

  // Scores of a product; scores or dP of a tile of them. They are no members, so that they take no registers
  // before their product begins.
  using ProductScores = float[layout.score_rows / 2];
  using Scores = float[tile_rows / 2];
  // A consumer's dQ leaves in at most two parts, a product each.
  template <int part>
  using DqPart = float[max(layout.dq_part_columns(part), 2) / 2];
  static constexpr int dq_parts = layout.dq_parts;

  // A warpgroup: it computes dK and dV of 64 keys, and its part of every dQ.
  class Consumer {
   public:
    FLASHJIT_FN Consumer(const CudaBackwardParams& p, const Shared& shared)
        : p_(p),
          shared_(shared),
          warpgroup_(__shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1),
          warp_(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0)),
          lane_(threadIdx.x % 32) {}

    FLASHJIT_FN void run() {
      Ring ring;
      place_ = first_turn(shared_);
#pragma unroll 1
      while (has_place(p_, place_)) {
        if constexpr (makes_dk)
#pragma unroll
          for (float& x : dk_) x = 0;
        if constexpr (makes_dv)
#pragma unroll
          for (float& x : dv_) x = 0;
        take_rows(ring);
        Message last;
        if constexpr (has_places) last = end_turn(ring);
        const auto write_sums = [&] { gradients().write_dk_dv(Work(p_, place_), dk_, dv_); };
        if constexpr (finishes_dq)
          gradients().write_dq(last, write_sums);
        else
          write_sums();
        if constexpr (!has_places) break;
        place_ = last.next_turn();
      }
      if constexpr (finishes_dq) {
        // Turns without a place.
#pragma unroll 1
        while (place_ != no_turn) {
          mbarrier_wait(shared_.q_full(ring.stage), ring.parity);
          const Message message = end_turn(ring);
          gradients().write_dq(message);
          place_ = message.next_turn();
        }
      }
      if constexpr (makes_dk && ScoreGradient::changes) {
        place_ = 0;  // any
        ScoreGradient::flush(p_, pairs(Work(p_, place_).problem, 0), terms_);
      }
      if constexpr (layout.stages_dq) gradients().end_dq(ds_ring_, place_, waiting_);
      griddepcontrol_launch_dependents();
    }

   private:
    // Takes the message that ends a turn, once dQ's rows of the turn are complete.
    FLASHJIT_FN Message end_turn(Ring& ring) const {
      mbarrier_wait(shared_.do_full(ring.stage), ring.parity);
      const Message message = shared_.read_message(ring.stage);
      __syncwarp();  // all have read it
      release(shared_.q_empty(ring.stage));
      release(shared_.do_empty(ring.stage));
      ring.advance();
      return message;
    }
    // Adds all blocks of rows to the sums. The ring ends at the message that there are no more.
    FLASHJIT_FN void take_rows(Ring& ring) {
      const bool any_keys = take_keys();
      Message message = take_q(ring);
      if constexpr (has_places) {
        if (staggers && warpgroup_ > 0 && !message.ends()) {
          mbarrier_wait(shared_.begun(), begun_parity_);
          begun_parity_ ^= 1;
        }
        if constexpr (tiles > 1) {
          // If the message is no block but the end, scores and dP are of no use.
          ProductScores scores;
          Scores dp;
          issue_scores(scores, ring.stage, 0);
          take_do(ring, message);
          issue_dp(dp, ring.stage, 0);
          wgmma_wait_group<0>();
          while (!message.ends()) add_in_tiles(scores, dp, ring, message);
        } else {
          while (!message.ends()) {
            add(ring, message);
            ring.advance();
            message = take_q(ring);
          }
        }
        const bool passed = waiting_ >= 0;
        if constexpr (delays_dq) add_last_dq();
        if (any_keys) release(shared_.keys_empty());
        if constexpr (finishes_dq)
          if (!(delays_dq && layout.stages_dq && passed)) end_place();
      } else {
        // Scores of a block are computed while the block before it ends. After the last block they are of no
        // use.
        Scores scores;
        issue_scores(scores, ring.stage);
        wgmma_wait_group<0>();
        if constexpr (sums == BackwardSums::dv) take_weights(scores, ring.stage, message);
        for (; !message.ends(); ring.advance()) {
          if constexpr (sums == BackwardSums::dv)
            add_to_dv(ring, message);
          else
            add_to_dk(scores, ring, message);
        }
        if constexpr (delays_dq) add_last_dq();
      }
    }
    FLASHJIT_FN Gradients gradients() const { return {p_, shared_, warpgroup_, warp_, lane_}; }
    // Adds a part of dQ of the block at `waiting_` to the sums.
    template <int part, int size>
    FLASHJIT_FN void pass_dq(const float (&dq)[size], const DsRing& of, bool last = false) const {
      gradients().template pass_dq<part>(dq, of, place_, waiting_, last);
    }
    FLASHJIT_FN void end_place() {
      gradients().end_place(ds_ring_, place_, waiting_);
      if constexpr (layout.stages_dq) {
        if constexpr (!delays_dq) wait_for_ds(ds_ring_);
        ds_ring_.advance();
      }
    }
    FLASHJIT_FN int first_key() const { return warpgroup_ * layout.warpgroup_keys + warp_ * 16; }
    FLASHJIT_FN void release(u32 empty) const { mbarrier_arrive_if(lane_ == 0, empty); }

    // Waits for K and V. Returns false if the place has no keys.
    FLASHJIT_FN bool take_keys() {
      const Work work(p_, place_);
      if (work.keys.empty()) return false;
      mbarrier_wait(shared_.k_full(), keys_parity_);
      if constexpr (makes_dk) mbarrier_wait(shared_.v_full(), keys_parity_);
      keys_parity_ ^= 1;
      if (ends_within_tensors<Spec> && work.keys.size() < block_n) {
        zero_rows_from<k_panels, block_n>(shared_.k(), work.keys.size());
        if constexpr (makes_dk) zero_rows_from<v_panels, block_n>(shared_.v(), work.keys.size());
        fence_proxy_async();
        bar_sync(warpgroup_barrier + warpgroup_, 128);
      }
      if constexpr (clears_keys) bad_keys_ = unknown_keys;
      if constexpr (Spec::dropout) make_column_words(work);
      return true;
    }
    // By a place's first scores: finds keys whose K is not finite among the thread's two, and makes it zeros.
    // All scores of such a key are infinite or NaN. No warp reads K of another's keys before it has this
    // block's dS.
    FLASHJIT_FN void clear_bad_keys(const Scores& scores) {
      if (!clears_keys || bad_keys_ != unknown_keys) return;
      bad_keys_ = 0;
      if (!__any_sync(0xffffffff, __fmaf_rn(scores[0], 0, scores[2] * 0) != 0)) return;
      const u32 lane = lane_;
      const RowOfTile<Element, PanelTile<k_panels, block_n>> k{shared_.k(), lane % 4, 4};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 row = first_key() + lane_ / 4 + 8 * r;
        float sum = k.zero_or_nan(row);
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        if (sum != 0) {
          bad_keys_ |= 1u << r;
          k.clear(row);
        }
      }
      fence_proxy_async();
    }
    // Zeros for rows of Q and dO whose weights are 0 or NaN. Each warpgroup writes the same ones. Scores may
    // be computed meanwhile: no score changes such weights.
    FLASHJIT_FN void clear_rows_without_weights(int stage) const {
      const u32 lane = lane_;
      u32 found = 0;
#pragma unroll
      for (int first = 0; first < block_m; first += 64) {
        float lse[2];
        ld_shared_v2(lse[0], lse[1], shared_.lse(stage) + first * 4 + lane * 8);
        found |= (has_no_weights(lse[0]) ? 1u : 0) << first / 32;
        found |= (has_no_weights(lse[1]) ? 2u : 0) << first / 32;
      }
      if (!__any_sync(0xffffffff, found != 0)) return;
      [[maybe_unused]] const RowOfTile<Element, PanelTile<k_panels, block_m>> q{shared_.q(stage), 0, 1};
      const RowOfTile<Element, PanelTile<v_panels, block_m>> d_o{shared_.d_o(stage), 0, 1};
#pragma unroll 1
      for (u32 i = 0; i < block_m / 32; ++i)
        if (found >> i & 1) {
          const u32 row = i / 2 * 64 + lane * 2 + i % 2;
          if constexpr (makes_dk) q.clear(row);
          d_o.clear(row);
        }
      fence_proxy_async();
      bar_sync(warpgroup_barrier + warpgroup_, 128);
    }
    // The words of the thread's two keys.
    FLASHJIT_FN void make_column_words(const Work& work) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = work.keys.begin + first_key() + lane_ / 4 + 8 * r;
        const Words words = dropout_column_words(shared_.dropout_key(), key / 4, work.problem.batch);
        const int at = key % 4;
        column_words_[r] = at == 0 ? words.x[0] : at == 1 ? words.x[1] : at == 2 ? words.x[2] : words.x[3];
      }
    }

    // Waits for a block's Q. A block's rows past the end have no weights.
    FLASHJIT_FN Message take_q(const Ring& ring) const {
      mbarrier_wait(shared_.q_full(ring.stage), ring.parity);
      const Message message = shared_.read_message(ring.stage);
      if constexpr (ends_within_tensors<Spec> && !isolates)
        if (!message.ends()) zero_past_the_end<k_panels>(shared_.q(ring.stage), message.index());
      return message;
    }
    FLASHJIT_FN void take_do(const Ring& ring, const Message& message) const {
      mbarrier_wait(shared_.do_full(ring.stage), ring.parity);
      if constexpr (isolates) clear_rows_without_weights(ring.stage);
      if constexpr (ends_within_tensors<Spec> && !isolates)
        zero_past_the_end<v_panels>(shared_.d_o(ring.stage), message.index());
    }
    FLASHJIT_FN static Ring next_of(Ring ring) {
      ring.advance();
      return ring;
    }

    // One block of query rows.
    FLASHJIT_FN void add(const Ring& ring, const Message& message) {
      const int stage = ring.stage;
      Scores scores, dp;
      issue_scores(scores, stage);
      take_do(ring, message);
      issue_dp(dp, stage);
      if constexpr (ScoreGradient::changes) {
        wgmma_wait_group<0>();
        differentiate(scores, dp, stage, message);
      } else {
        wgmma_wait_group<1>();
        // The other consumer begins while this one is between its products.
        if constexpr (staggers)
          mbarrier_arrive_if(waiting_ < 0 && warpgroup_ == 0 && lane_ == 0, shared_.begun());
        weigh(scores, stage, message);
        if constexpr (early_dv) {
          pack_weights(scores);
          issue_dv(stage);
          wgmma_wait_group<1>();
        } else {
          wgmma_wait_group<0>();
        }
        make_ds(scores, dp, stage, message);
      }
      if constexpr (!early_dv) {
        if constexpr (!packs_late) pack_weights(scores);
        issue_dv(stage);
      }
      DqPart<0> first;
      DqPart<1> second;
      DsRing of = ds_ring_;
      if constexpr (delays_dq) {
        // Once all have passed dS of the block before, no one reads the buffer that dS goes to now.
        of = before(ds_ring_);
        wait_for_ds(of);
        pass_ds();
      } else if constexpr (makes_dq) {
        waiting_ = message.place;
        pass_ds();
        wait_for_ds(of);
      }
      if constexpr (makes_dq) issue_dq_parts(first, second, of.stage);  // of no use in a place's first step
      issue_dk(stage);
      wgmma_wait_group<1>();  // all but dK
      release(shared_.do_empty(stage));
      // dQ leaves while dK is computed.
      if constexpr (makes_dq) {
        if (!delays_dq || waiting_ >= 0) pass_dq_parts(first, second, of);
        // From shared memory once more, so that no register holds it meanwhile.
        if constexpr (delays_dq) waiting_ = shared_.read_message(stage).place;
        ds_ring_.advance();
      }
      wgmma_wait_group<0>();
      release(shared_.q_empty(stage));
    }
    // The same in two tiles, for a block that has the scores of its first product, and dP of its first tile.
    // Computes those of the next block, whose message takes the place of this one's, while dQ leaves.
    FLASHJIT_FN void add_in_tiles(ProductScores& scores, Scores& dp, Ring& ring, Message& message) {
      static_assert(tiles <= 2 && dq_parts <= 2);
      const int stage = ring.stage;
      make_tile(tile_of(scores, 0), dp, stage, message, 0);
      DsRing of = ds_ring_;
      if constexpr (delays_dq) {
        of = before(ds_ring_);
        wait_for_ds(of);
      }
      if constexpr (makes_dq) store_ds(0);
      issue_dv(stage, 0);
      issue_dk(stage, 0);
      [[maybe_unused]] ProductScores scores1;
      if constexpr (score_tiles > 1) issue_scores(scores1, stage, 1);
      Scores dp1;
      issue_dp(dp1, stage, 1);
      wgmma_wait_group<1>();  // all but dP
      make_tile(score_tiles > 1 ? tile_of(scores1, 0) : tile_of(scores, tiles - 1), dp1, stage, message, 1);
      if constexpr (!delays_dq) waiting_ = message.place;
      const int place = message.place;
      issue_dv(stage, 1);
      if constexpr (makes_dq) {
        pass_ds();
        if constexpr (!delays_dq) wait_for_ds(of);
      }
      issue_dk(stage, 1);
      wgmma_wait_group<1>();  // all but dK
      release(shared_.do_empty(stage));
      // dQ takes the registers of the weights, which dV's product no longer reads.
      const bool any = !delays_dq || waiting_ >= 0;
      DqPart<0> first;
      if constexpr (makes_dq) issue_dq<0>(first, shared_.ds(of.stage));  // of no use in a place's first step
      wgmma_wait_group<makes_dq ? 1 : 0>();                              // dK
      release(shared_.q_empty(stage));
      wgmma_wait_group<0>();
      if constexpr (makes_dq)
        if (any) pass_dq<0>(first, of);
      DqPart<1> second;
      if constexpr (makes_dq && dq_parts > 1) issue_dq<1>(second, shared_.ds(of.stage));
      ProductScores next;
      Scores next_dp;
      ring.advance();
      message = take_q(ring);
      issue_scores(next, ring.stage, 0);
      if constexpr (makes_dq && dq_parts > 1) {
        wgmma_wait_group<1>();  // all but the scores
        if (any) pass_dq<1>(second, of);
      }
      take_do(ring, message);
      issue_dp(next_dp, ring.stage, 0);
      if constexpr (delays_dq) waiting_ = place;
      if constexpr (makes_dq) ds_ring_.advance();
      wgmma_wait_group<0>();
      assign(scores, next);
      assign(dp, next_dp);
    }
    FLASHJIT_FN static Scores& tile_of(ProductScores& scores, int tile) {
      return *reinterpret_cast<Scores*>(scores + tile * (tile_rows / 2));
    }
    // Makes weights and dS of a tile of a block, whose dP may not be there yet.
    FLASHJIT_FN void make_tile(Scores& scores, Scores& dp, int stage, const Message& message, int tile) {
      if constexpr (ScoreGradient::changes) {
        wgmma_wait_group<0>();
        differentiate(scores, dp, stage, message, tile);
        pack_weights(scores);
      } else {
        weigh(scores, stage, message, tile);
        wgmma_wait_group<0>();
        make_ds(scores, dp, stage, message, tile);
      }
    }
    // dQ of a place's last block. Without blocks the product is of no use; a branch around it would cost
    // registers.
    FLASHJIT_FN void add_last_dq() {
      const DsRing of = before(ds_ring_);
      DqPart<0> first;
      DqPart<1> second;
      wait_for_ds(of);
      if constexpr (tiles == 1) {
        issue_dq_parts(first, second, of.stage);
        wgmma_wait_group<0>();
        if (waiting_ >= 0) pass_dq_parts(first, second, of, true);
      } else {
        issue_dq<0>(first, shared_.ds(of.stage));
        wgmma_wait_group<0>();
        if (waiting_ >= 0) pass_dq<0>(first, of, true);
        if constexpr (dq_parts > 1) {
          issue_dq<1>(second, shared_.ds(of.stage));
          wgmma_wait_group<0>();
          if (waiting_ >= 0) pass_dq<1>(second, of, true);
        }
      }
      waiting_ = -1;
    }
    FLASHJIT_FN void issue_dq_parts(DqPart<0>& first, DqPart<1>& second, int buffer) {
      issue_dq<0>(first, shared_.ds(buffer));
      if constexpr (dq_parts > 1) issue_dq<1>(second, shared_.ds(buffer));
    }
    FLASHJIT_FN void pass_dq_parts(const DqPart<0>& first, const DqPart<1>& second, const DsRing& of,
                                   bool last = false) const {
      pass_dq<0>(first, of, last);
      if constexpr (dq_parts > 1) pass_dq<1>(second, of, last);
    }
    FLASHJIT_FN void pass_ds() const {
      store_ds(tiles - 1);
      __syncwarp();
      release(shared_.ds_full(ds_ring_.stage));
    }
    FLASHJIT_FN void wait_for_ds(const DsRing& ring) const {
      mbarrier_wait(shared_.ds_full(ring.stage), ring.parity);
    }
    FLASHJIT_FN static DsRing before(DsRing ring) {
      ring.retreat(1);
      return ring;
    }

    // The same without dV, for a block whose scores are there. Computes those of the next block, whose
    // message takes the place of this one's.
    FLASHJIT_FN void add_to_dk(Scores& scores, const Ring& ring, Message& message) {
      const int stage = ring.stage;
      const Message now = message;
      take_do(ring, now);
      Scores dp;
      issue_dp(dp, stage, 0);
      if constexpr (!ScoreGradient::changes) weigh(scores, stage, now);
      wgmma_wait_group<0>();
      release(shared_.do_empty(stage));
      if constexpr (ScoreGradient::changes)
        differentiate(scores, dp, stage, now, 0);
      else
        make_ds(scores, dp, stage, now);
      if constexpr (delays_dq) {
        const DsRing of = before(ds_ring_);
        wait_for_ds(of);
        pass_ds();
        DqPart<0> first;
        issue_dq<0>(first, shared_.ds(of.stage));
        issue_dk(stage, 0);
        wgmma_wait_group<1>();
        if (waiting_ >= 0) pass_dq<0>(first, of);
        DqPart<1> second;
        if constexpr (dq_parts > 1) issue_dq<1>(second, shared_.ds(of.stage));
        Scores following;
        issue_next_scores(following, ring, message);
        wgmma_wait_group<dq_parts>();  // dK
        release(shared_.q_empty(stage));
        if constexpr (dq_parts > 1) {
          wgmma_wait_group<1>();
          if (waiting_ >= 0) pass_dq<1>(second, of);
        }
        waiting_ = now.place;
        ds_ring_.advance();
        wgmma_wait_group<0>();
        assign(scores, following);
        return;
      }
      if constexpr (makes_dq) pass_ds();
      issue_dk(stage, 0);
      Scores following;
      if constexpr (makes_dq) {
        waiting_ = now.place;
        wait_for_ds(ds_ring_);
        const DsRing here = ds_ring_;
        ds_ring_.advance();
        DqPart<0> first;
        issue_dq<0>(first, shared_.ds(here.stage));
        wgmma_wait_group<1>();  // dK
        release(shared_.q_empty(stage));
        if constexpr (dq_parts > 1) {
          wgmma_wait_group<0>();
          pass_dq<0>(first, here);
          // A second part only now: registers would not hold both.
          DqPart<1> second;
          issue_dq<1>(second, shared_.ds(here.stage));
          issue_next_scores(following, ring, message);
          wgmma_wait_group<1>();
          pass_dq<1>(second, here);
        } else {
          issue_next_scores(following, ring, message);
          wgmma_wait_group<1>();
          pass_dq<0>(first, here);
        }
      } else {
        wgmma_wait_group<0>();
        release(shared_.q_empty(stage));
        issue_next_scores(following, ring, message);
      }
      wgmma_wait_group<0>();
      assign(scores, following);
    }
    // No asm statement may have the old scores as operands: they would stay alive until then.
    template <int size>
    FLASHJIT_FN static void assign(float (&to)[size], const float (&from)[size]) {
#pragma unroll
      for (int i = 0; i < size; ++i) to[i] = from[i];
    }
    FLASHJIT_FN void issue_next_scores(Scores& scores, const Ring& ring, Message& message) {
      const Ring next = next_of(ring);
      message = take_q(next);
      issue_scores(scores, next.stage);
    }

    // dV alone, for a block whose weights are there. Makes those of the next one while dV is computed.
    FLASHJIT_FN void add_to_dv(const Ring& ring, Message& message) {
      const Ring next = next_of(ring);
      const Message now = message;
      Scores scores;
      issue_next_scores(scores, ring, message);
      take_do(ring, now);
      if constexpr (isolates) release(shared_.q_empty(ring.stage));
      issue_dv(ring.stage, 0);
      wgmma_wait_group<1>();
      weigh(scores, next.stage, message);
      wgmma_wait_group<0>();
      release(shared_.do_empty(ring.stage));
      // take_do() reads the rows' lse once more if the mask has block lists.
      if constexpr (!isolates) release(shared_.q_empty(next.stage));
      pack_weights(scores);
    }
    FLASHJIT_FN void take_weights(Scores& scores, int stage, const Message& message) {
      weigh(scores, stage, message);
      if constexpr (!isolates) release(shared_.q_empty(stage));
      pack_weights(scores);
    }

    static constexpr int tile_bytes = tile_rows * 128;  // of a panel
    FLASHJIT_FN u64 q_operand(int stage, int tile) const {
      return wgmma_descriptor(shared_.q(stage) + tile * tile_bytes, layout.q_panel);
    }
    FLASHJIT_FN u64 do_operand(int stage, int tile) const {
      return wgmma_descriptor(shared_.d_o(stage) + tile * tile_bytes, layout.q_panel);
    }
    FLASHJIT_FN void issue_scores(ProductScores& scores, int stage, int tile = 0) const {
      wgmma_fence();
      Products::s(scores, wgmma_descriptor(shared_.k() + own_keys(), 0), q_operand(stage, tile));
      wgmma_commit_group();
    }
    FLASHJIT_FN void issue_dp(Scores& dp, int stage, int tile = 0) const {
      wgmma_fence();
      Products::dp(dp, wgmma_descriptor(shared_.v() + own_keys(), 0), do_operand(stage, tile));
      wgmma_commit_group();
    }
    // Bytes from the start of K's and V's panels to the warpgroup's keys.
    FLASHJIT_FN u32 own_keys() const { return warpgroup_ * (layout.warpgroup_keys * 128); }

    // Makes zeros of a tile's rows past the sequence's end.
    template <int panels>
    FLASHJIT_FN void zero_past_the_end(u32 tile, int index) const {
      const int rows = Work(p_, place_).problem.seqlen_q - index * block_m;
      if (rows >= block_m) return;
      zero_rows_from<panels, block_m>(tile, rows);
      fence_proxy_async();
      bar_sync(warpgroup_barrier + warpgroup_, 128);
    }

    // Registers 4 i ... 4 i + 3 of a thread hold rows 8 i + 2 (lane % 4) and the next one: first of key
    // lane / 4, then of key lane / 4 + 8.

    // The thread's pairs, for formulas.
    FLASHJIT_FN auto pairs(const Problem& problem, int first_row) const {
      const int first = Work(p_, place_).keys.begin + first_key();
      return typename ScoreGradient::Place(p_, problem, first_row + lane_ % 4 * 2, first + lane_ / 4);
    }
    // Both at once, where formulas have derivatives: scores become weights, dP becomes dS.
    FLASHJIT_FN void differentiate(Scores& scores, Scores& dp, int stage, const Message& message,
                                   int tile = 0) {
      const int at = tile * tile_rows;
      clear_bad_keys(scores);
      if (!message.whole()) mask_scores(scores, message, tile, minus_infinity);
      drop_bad_keys(scores);
      if constexpr (Spec::dropout) find_dropped(stage, tile);
      const u32 own = at * 4 + lane_ % 4 * 8;
      ScoreGradient::template differentiate<tile_rows>(
          p_, scores, dp, pairs(Work(p_, place_).of_head(message.second), message.index() * block_m + at),
          terms_,
          [&](int i, float(&lse)[2], float(&delta)[2]) {
            ld_shared_v2(lse[0], lse[1], shared_.lse(stage) + own + i * 32);
            ld_shared_v2(delta[0], delta[1], shared_.delta(stage) + own + i * 32);
          },
          [&](int index, float product) {
            if constexpr (Spec::dropout) return is_dropped(index) ? 0 : product * p_.dropout.scale;
            return product;
          });
#pragma unroll
      for (int i = 0; i < tile_rows / 4; ++i)
        ds_[i / 4][i % 4] = cvt_rn_x2(Element{}, dp[2 * i], dp[2 * i + 1]);
    }
    FLASHJIT_FN void drop_bad_keys(Scores& scores) const {
      if (clears_keys && bad_keys_) {
#pragma unroll
        for (int i = 0; i < tile_rows / 2; ++i)
          if (bad_keys_ >> i / 2 % 2 & 1) scores[i] = minus_infinity;
      }
    }

    // Scores become weights. A row without keys has an lse of infinity here, so its weights are 0.
    FLASHJIT_FN void weigh(Scores& scores, int stage, const Message& message, int tile = 0) {
      const int at = tile * tile_rows;
      clear_bad_keys(scores);
      if constexpr (Score::changes)
        ScoreGradient::template modify<tile_rows>(
            scores, pairs(Work(p_, place_).of_head(message.second), message.index() * block_m + at));
      if (!isolates && !message.whole()) mask_scores(scores, message, tile, minus_infinity);
      drop_bad_keys(scores);
      const float scale_log2 = Score::scale_log2(p_);
      const u32 from = shared_.lse(stage) + at * 4 + lane_ % 4 * 8;
#pragma unroll
      for (int i = 0; i < tile_rows / 8; ++i) {
        float lse[2];
        ld_shared_v2(lse[0], lse[1], from + i * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          scores[4 * i + j] = ex2_approx(__fmaf_rn(scores[4 * i + j], scale_log2, -lse[j % 2]));
      }
      if (isolates && !message.whole()) mask_scores(scores, message, tile, 0);
      if constexpr (Spec::dropout) mark_dropped(scores, stage, tile);
    }
    FLASHJIT_FN u32 words_of_thread(int stage, int tile) const {
      return shared_.words(stage) + tile * (tile_rows * 8) + lane_ % 4 * 16;
    }
    // No weight is negative, so a set sign marks a dropped one: tests of it take fewer instructions than
    // those of bits.
    FLASHJIT_FN void mark_dropped(Scores& weights, int stage, int tile) const {
      const u32 from = words_of_thread(stage, tile);
#pragma unroll
      for (int i = 0; i < tile_rows / 8; ++i) {
        u32 words[4];
        ld_shared_v4(words, from + i * 64);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          u32 bits = __float_as_uint(weights[4 * i + j]);
          if (dropped({words[j % 2 * 2], words[j % 2 * 2 + 1]}, column_words_[j / 2], p_.dropout.below))
            bits |= 0x80000000u;
          weights[4 * i + j] = __uint_as_float(bits);
        }
      }
    }
    // 0 for a marked weight. Integers have the order of floats: marked ones become 0, also NaN.
    FLASHJIT_FN static float kept(float weight) {
      if constexpr (!Spec::dropout) return weight;
      return __uint_as_float(static_cast<u32>(max(static_cast<int>(__float_as_uint(weight)), 0)));
    }
    FLASHJIT_FN void find_dropped(int stage, int tile) {
      const u32 from = words_of_thread(stage, tile);
#pragma unroll
      for (int i = 0; i < tile_rows / 8; ++i) {
        u32 words[4];
        ld_shared_v4(words, from + i * 64);
        if (i % 8 == 0) dropped_[i / 8] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (dropped({words[j % 2 * 2], words[j % 2 * 2 + 1]}, column_words_[j / 2], p_.dropout.below))
            dropped_[i / 8] |= 1u << (i % 8 * 4 + j);
      }
    }
    FLASHJIT_FN bool is_dropped(int i) const { return dropped_[i / 32] >> i % 32 & 1; }

    // dP^T becomes dS^T, in the form of an operand. Where the mask drops pairs whose V may be anything, dS of
    // a weight of 0 is 0.
    FLASHJIT_FN void make_ds(const Scores& scores, const Scores& dp, int stage, const Message& message,
                             int tile = 0) {
      if (isolates && !message.whole())
        make_ds<true>(scores, dp, stage, tile);
      else
        make_ds<false>(scores, dp, stage, tile);
    }
    template <bool drops>
    FLASHJIT_FN void make_ds(const Scores& scores, const Scores& dp, int stage, int tile) {
      const u32 from = shared_.delta(stage) + tile * (tile_rows * 4) + lane_ % 4 * 8;
#pragma unroll
      for (int i = 0; i < tile_rows / 8; ++i) {
        float delta[2], ds[4];
        ld_shared_v2(delta[0], delta[1], from + i * 32);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float weight = scores[4 * i + j];
          if constexpr (Spec::dropout)
            ds[j] = __fmaf_rn(kept(weight), dp[4 * i + j], fabsf(weight) * -delta[j % 2]);
          else
            ds[j] = weight * (dp[4 * i + j] - delta[j % 2]);
          if (drops && weight == 0) ds[j] = 0;
        }
        ds_[i / 2][i % 2 * 2] = cvt_rn_x2(Element{}, ds[0], ds[1]);
        ds_[i / 2][i % 2 * 2 + 1] = cvt_rn_x2(Element{}, ds[2], ds[3]);
        if constexpr (packs_late) pack_weights(scores, i);
      }
    }
    // A thread holds the same elements of an accumulator and of operand A.
    FLASHJIT_FN void pack_weights(const Scores& scores) {
#pragma unroll
      for (int i = 0; i < tile_rows / 8; ++i) pack_weights(scores, i);
    }
    FLASHJIT_FN void pack_weights(const Scores& scores, int i) {
      const auto weight = [&](int j) {
        const float computed = scores[4 * i + j];
        if constexpr (Spec::dropout && ScoreGradient::changes)
          return is_dropped(4 * i + j) ? 0.f : computed;
        else
          return kept(computed);
      };
      weights_[i / 2][i % 2 * 2] = cvt_rn_x2(Element{}, weight(0), weight(1));
      weights_[i / 2][i % 2 * 2 + 1] = cvt_rn_x2(Element{}, weight(2), weight(3));
    }
    FLASHJIT_FN void issue_dv(int stage, int tile = 0) {
      wgmma_fence();
      Products::dv(dv_, weights_, do_operand(stage, tile), 1);
      wgmma_commit_group();
    }
    // dS^T to shared memory, as rows of 64 keys: a panel for each consumer.
    FLASHJIT_FN void store_ds(int tile) const {
      const u32 buffer = shared_.ds(ds_ring_.stage) + tile * tile_bytes;
      const int matrix = lane_ / 8, row = matrix / 2 * 8 + lane_ % 8, chunk = warp_ * 2 + matrix % 2;
      const u32 to = buffer + warpgroup_ * layout.q_panel + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
      for (int step = 0; step < steps; ++step) stmatrix_x4_trans(to + step * (16 * 128), ds_[step]);
      fence_proxy_async();
    }
    FLASHJIT_FN void issue_dk(int stage, int tile = 0) {
      wgmma_fence();
      Products::dk(dk_, ds_, q_operand(stage, tile), 1);
      wgmma_commit_group();
    }
    template <int part>
    FLASHJIT_FN void issue_dq(DqPart<part>& dq, u32 buffer) {
      const u64 ds = wgmma_descriptor(buffer + (layout.divides_rows ? warpgroup_ * (64 * 128) : 0), 0);
      wgmma_fence();
      if constexpr (layout.divides_rows || part < layout.dq_pairs)
        Products::dq(dq, ds, dq_keys(part));
      else
        Products::dq_last(dq, ds, dq_keys(part));
      wgmma_commit_group();
    }
    // K's columns of a part of dQ.
    FLASHJIT_FN u64 dq_keys(int part) const {
      constexpr Sm90aBackwardLayout parts = layout;  // device memory has no place for a static member
      const int column = parts.dq_first_column(part, warpgroup_), panel = column / layout.panel;
      return wgmma_descriptor(shared_.k() + panel * layout.k_panel + column % layout.panel * 2,
                              parts.dq_leading(warpgroup_));
    }
    // Gives `value` to the pairs that the mask drops.
    FLASHJIT_FN void mask_scores(Scores& scores, const Message& message, int tile, float value) {
      const Work work(p_, place_);
      const Mask mask(p_, work.of_head(message.second));
      const int first_row = message.index() * block_m + tile * tile_rows, key = work.keys.begin + first_key();
      const Sm90aBackwardMasked<tile_rows, isolates> masked{
          scores, work.problem.seqlen_q, work.keys.end, first_row, key, lane_, value};
      if constexpr (has_formula<Mask>)
        drop_pairs<tile_rows>(scores, mask, work.problem, first_row + lane_ % 4 * 2, key + lane_ / 4, value,
                              masked);
      else
        masked(mask);
    }
    const CudaBackwardParams& p_;
    const Shared& shared_;
    u32 place_ = 0, keys_parity_ = 0, begun_parity_ = 0;
    const int warpgroup_, warp_, lane_;  // the first two by shuffle, so that uniform registers hold them
    float dk_[makes_dk ? Spec::head_dim / 2 : 1], dv_[makes_dv ? Spec::head_dim_v / 2 : 1];
    u32 weights_[steps][4], ds_[steps][4];
    u32 column_words_[2], dropped_[ceil_div(tile_rows, 64)];  // with dropout
    // The gradients of learned tables, as far as this thread has added them up.
    [[no_unique_address]]
    typename TermsOf<ScoreGradient, Spec::deterministic, makes_dk && ScoreGradient::changes>::type terms_;
    DsRing ds_ring_;    // where the next dS goes
    int waiting_ = -1;  // the place of the block whose dQ is to be computed, -1 if there is none
    static constexpr u32 unknown_keys = 4;
    u32 bad_keys_ = 0;  // if `clears_keys`: a bit for each of the thread's two keys
  };

  static FLASHJIT_FN void run(const CudaBackwardParams& p, const BackwardMaps& maps) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const Shared shared{dynamic_shared, shared_address(dynamic_shared)};
    if (threadIdx.x == 0) {
      prefetch_tensormap(maps.q);
      prefetch_tensormap(maps.k);
      if constexpr (makes_dk) prefetch_tensormap(maps.v);
      prefetch_tensormap(maps.d_o);
      mbarrier_init(shared.k_full(), 1);
      mbarrier_init(shared.v_full(), 1);
      mbarrier_init(shared.keys_empty(), consumer_warps);
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(shared.q_full(stage), 2);
        mbarrier_init(shared.q_empty(stage), consumer_warps);
        mbarrier_init(shared.do_full(stage), makes_dk ? 2 : 1);
        mbarrier_init(shared.do_empty(stage), consumer_warps);
        mbarrier_init(shared.asked(stage), 1);
      }
      for (int consumer = 0; consumer < consumers; ++consumer) {
        mbarrier_init(shared.dq_full(consumer), 4);
        mbarrier_init(shared.dq_empty(consumer), 1);
      }
      for (int buffer = 0; buffer < layout.ds_buffers; ++buffer)
        mbarrier_init(shared.ds_full(buffer), consumer_warps);
      mbarrier_init(shared.begun(), 4);
      fence_mbarrier_init();
      if constexpr (has_places) {
        griddepcontrol_wait();
        st_shared(shared.first_turn(), take_turn(p));
      }
    }
    if (Spec::dropout && threadIdx.x == 32)
      *reinterpret_cast<Words*>(dynamic_shared + layout.dropout_key) = dropout_key(p.dropout);
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dec<producer_registers>();
      if (threadIdx.x == 0) {
        Producer::copy(p, maps, shared);
      } else if (threadIdx.x / 32 == 1) {
        Producer::add_rows(p, shared);
      } else if (layout.stages_dq && threadIdx.x >= 64 && threadIdx.x % 32 == 0) {
        if (threadIdx.x / 32 - 2 < consumers) Producer::add_dq(p, shared, threadIdx.x / 32 - 2);
      }
    } else {
      setmaxnreg_inc<consumer_registers>();
      Consumer(p, shared).run();
    }
  }
};

template <class Spec, class Config>
FLASHJIT_FN void backward_sm90a(const CudaBackwardParams& params, const BackwardMaps& maps) {
  if constexpr (!backward_divides_sums(Spec::head_dim, Spec::head_dim_v)) {
    BackwardSm90a<Spec, Config, BackwardSums::both>::run(params, maps);
  } else {
    // In turns: only dK adds to dQ, and memory takes less at once than all blocks would add.
    if (blockIdx.x % 2 == 0)
      BackwardSm90a<Spec, Config, BackwardSums::dk>::run(params, maps);
    else
      BackwardSm90a<Spec, Config, BackwardSums::dv>::run(params, maps);
  }
}

}  // namespace flashjit::device
