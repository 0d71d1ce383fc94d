// A consumer of sm_90a's backward: the products of each step in order, and which of them run at once.
#pragma once

#include "cuda/backward_sm90a_gradients.cuh"
#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_products.cuh"
#include "cuda/backward_sm90a_shared.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/backward_sm90a_weights.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

// A warpgroup: it computes dK and dV of 64 keys, and its part of every dQ.
template <class Kernel>
class Sm90aBackwardConsumer {
  using Spec = typename Kernel::Spec;
  using Element = typename Kernel::Element;
  using ScoreGradient = typename Kernel::ScoreGradient;
  using Products = Sm90aBackwardProducts<Kernel>;
  using Shared = typename Kernel::Shared;
  using Work = typename Kernel::Work;
  using Ring = typename Kernel::Ring;
  using DsRing = typename Kernel::DsRing;
  using Scores = typename Kernel::Scores;
  using Weights = Sm90aBackwardWeights<Kernel>;
  using Gradients = Sm90aBackwardGradients<Kernel>;
  using Message = BackwardMessage;
  static constexpr Sm90aBackwardLayout layout = Kernel::layout;
  static constexpr BackwardSums sums = Kernel::sums;
  static constexpr int block_m = Kernel::block_m, block_n = Kernel::block_n;
  static constexpr int k_panels = Kernel::k_panels, v_panels = Kernel::v_panels;
  static constexpr int tile_rows = Kernel::tile_rows, tiles = Kernel::tiles, dq_parts = Kernel::dq_parts;
  static constexpr bool makes_dk = Kernel::makes_dk, makes_dv = Kernel::makes_dv, makes_dq = Kernel::makes_dq;
  static constexpr bool has_places = Kernel::has_places, finishes_dq = Kernel::finishes_dq;
  static constexpr bool isolates = Kernel::isolates;

  // Whether dQ of a block is computed during the step of the next one.
  static constexpr bool delays_dq = makes_dq && layout.ds_buffers > 2 && !(isolates && block_m > 64);
  static constexpr bool early_dv = Kernel::early_dv, packs_late = Kernel::packs_late;
  // Whether dS goes to shared memory while dQ of the block before is computed. Where dV is issued after dS,
  // this is slower.
  static constexpr bool passes_ds_late = delays_dq && early_dv;

  // Whether the consumers take turns at scores and weights, so that one makes weights during the products of
  // the other. Without this both run in phase, and no product runs while they make weights. With 64 rows,
  // whose weights take less time, it is slower.
  static constexpr bool alternates = delays_dq && block_m > 64 && Kernel::consumers == 2;

  // Whether a place's work is made again at its end. Formulas of 128 rows leave no registers to keep it.
  static constexpr bool remakes_work =
      has_places && tiles == 1 && block_m > 64 && Kernel::Score::changes && !ScoreGradient::changes;

  // Ids of named barriers, + consumer: its own four warps; its entry to weights. 0 belongs to __syncthreads.
  static constexpr int warpgroup_barrier = 1, weights_barrier = 3;

  static constexpr int score_tiles = block_m / layout.score_rows;
  // Scores of a product. They are no members, nor are those of a tile, so that they take no registers before
  // their product begins.
  using ProductScores = float[layout.score_rows / 2];
  // A consumer's dQ leaves in at most two parts, a product each.
  template <int part>
  using DqPart = float[max(layout.dq_part_columns(part), 2) / 2];

 public:
  FLASHJIT_FN Sm90aBackwardConsumer(const CudaBackwardParams& p, const Shared& shared)
      : p_(p),
        shared_(shared),
        warpgroup_(__shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0)),
        lane_(threadIdx.x % 32),
        weights_(p, shared, warpgroup_, warp_, lane_) {}

  FLASHJIT_FN void run() {
    Ring ring;
    if (warpgroup_ == 1) leave_weights();  // so the first consumer enters first
    place_ = Kernel::first_turn(shared_);
#pragma unroll 1
    while (Kernel::has_place(p_, place_)) {
      if constexpr (makes_dk)
#pragma unroll
        for (float& x : dk_) x = 0;
      if constexpr (makes_dv)
#pragma unroll
        for (float& x : dv_) x = 0;
      take_rows(ring);
      Message last;
      if constexpr (has_places) last = end_turn(ring);
      const auto write_sums = [&] { gradients().write_dk_dv(work_at_end(), dk_, dv_); };
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
    if constexpr (makes_dk && ScoreGradient::changes) weights_.flush_terms();
    if constexpr (layout.stages_dq || Kernel::orders_dq) gradients().end_dq(ds_ring_, place_, waiting_);
    griddepcontrol_launch_dependents();
  }

 private:
  // Takes the message that ends a turn, once dQ's rows of the turn are complete.
  FLASHJIT_FN Message end_turn(Ring& ring) const {
    mbarrier_wait(shared_.do_full(ring.stage), ring.parity);
    mbarrier_wait(shared_.numbers_full(ring.stage), ring.parity);
    const Message message = shared_.read_message(ring.stage);
    __syncwarp();  // all have read it
    release(shared_.q_empty(ring.stage));
    release(shared_.do_empty(ring.stage));
    ring.advance();
    return message;
  }
  // Adds all blocks of rows to the sums. The ring ends at the message that there are no more.
  FLASHJIT_FN void take_rows(Ring& ring) {
    bool any_keys = take_keys();
    Message message = take_q(ring);
    if constexpr (has_places) {
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
      if constexpr (remakes_work) any_keys = !work_at_end().keys.empty();
      if (any_keys) release(shared_.keys_empty());
      if constexpr (finishes_dq)
        if (!(delays_dq && layout.stages_dq && passed)) end_place();
    } else {
      // Scores of a block are computed while the block before it ends. After the last block they are of no
      // use.
      Scores scores;
      issue_scores(scores, ring.stage);
      wgmma_wait_group<0>();
      if constexpr (sums == BackwardSums::dv) take_weights(scores, ring, message);
      for (; !message.ends(); ring.advance()) {
        if constexpr (sums == BackwardSums::dv)
          add_to_dv(ring, message);
        else
          add_to_dk(scores, ring, message);
      }
      if constexpr (delays_dq) add_last_dq();
    }
  }
  // A place's work when its rows are done.
  FLASHJIT_FN Work work_at_end() const {
    u32 place = place_;
    // Hides the value's origin, so that nothing that depends on it is kept from the place's start.
    if constexpr (remakes_work) asm volatile("" : "+r"(place));
    return Work(p_, place);
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
  // block: of rows whose dQ this step adds; -1 if it adds none.
  FLASHJIT_FN void ask_for_dq(int block) const {
    if constexpr (Kernel::orders_dq && !layout.stages_dq)
      if (block >= 0) gradients().ask_for_dq(place_, block);
  }
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
    weights_.take_keys(work);
    return true;
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
    if constexpr (isolates) {
      mbarrier_wait(shared_.numbers_full(ring.stage), ring.parity);
      clear_rows_without_weights(ring.stage);
    }
    if constexpr (ends_within_tensors<Spec> && !isolates)
      zero_past_the_end<v_panels>(shared_.d_o(ring.stage), message.index());
  }
  // Waits for the numbers of a block's rows, which complete its message.
  FLASHJIT_FN void take_numbers(const Ring& ring, Message& message) const {
    mbarrier_wait(shared_.numbers_full(ring.stage), ring.parity);
    message.word = shared_.read_message(ring.stage).word;
    message.place = shared_.read_message(ring.stage).place;
  }
  FLASHJIT_FN void enter_weights() const {
    if constexpr (alternates) bar_sync(weights_barrier + warpgroup_, 256);
  }
  FLASHJIT_FN void leave_weights() const {
    if constexpr (alternates) bar_arrive(weights_barrier + 1 - warpgroup_, 256);
  }
  FLASHJIT_FN static Ring next_of(Ring ring) {
    ring.advance();
    return ring;
  }

  // One block of query rows.
  FLASHJIT_FN void add(const Ring& ring, Message& message) {
    const int stage = ring.stage;
    Scores scores, dp;
    enter_weights();
    issue_scores(scores, stage);
    take_do(ring, message);
    issue_dp(dp, stage);
    take_numbers(ring, message);
    if constexpr (ScoreGradient::changes) {
      wgmma_wait_group<0>();
      weights_.differentiate(scores, dp, place_, stage, message);
      leave_weights();
    } else {
      wgmma_wait_group<1>();
      weights_.weigh(scores, place_, stage, message);
      leave_weights();
      if constexpr (early_dv) {
        weights_.pack(scores);
        issue_dv(stage);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      weights_.make_ds(scores, dp, stage, message);
    }
    if constexpr (!early_dv) {
      if constexpr (!packs_late) weights_.pack(scores);
      issue_dv(stage);
    }
    DqPart<0> first;
    DqPart<1> second;
    DsRing of = ds_ring_;
    if constexpr (delays_dq) {
      // Once all have passed dS of the block before, no one reads the buffer that dS goes to now.
      of = before(ds_ring_);
      wait_for_ds(of);
      if constexpr (!passes_ds_late) pass_ds();
    } else if constexpr (makes_dq) {
      waiting_ = message.place;
      pass_ds();
      wait_for_ds(of);
    }
    if constexpr (makes_dq) issue_dq_parts(first, second, of.stage);  // of no use in a place's first step
    issue_dk(stage);
    if constexpr (passes_ds_late) pass_ds();
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
    take_numbers(ring, message);
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
      weights_.differentiate(scores, dp, place_, stage, message, tile);
      weights_.pack(scores);
    } else {
      weights_.weigh(scores, place_, stage, message, tile);
      wgmma_wait_group<0>();
      weights_.make_ds(scores, dp, stage, message, tile);
    }
  }
  // dQ of a place's last block. Without blocks the product is of no use; a branch around it would cost
  // registers.
  FLASHJIT_FN void add_last_dq() {
    ask_for_dq(waiting_);
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
  FLASHJIT_FN void store_ds(int tile) const {
    weights_.store_ds(shared_.ds(ds_ring_.stage) + tile * tile_bytes);
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
    Message now = message;
    take_do(ring, now);
    Scores dp;
    issue_dp(dp, stage, 0);
    take_numbers(ring, now);
    ask_for_dq(delays_dq ? waiting_ : now.place);
    if constexpr (!ScoreGradient::changes) weights_.weigh(scores, place_, stage, now);
    wgmma_wait_group<0>();
    release(shared_.do_empty(stage));
    if constexpr (ScoreGradient::changes)
      weights_.differentiate(scores, dp, place_, stage, now, 0);
    else
      weights_.make_ds(scores, dp, stage, now);
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
    DqPart<0> first;
    if constexpr (makes_dq) {
      waiting_ = now.place;
      wait_for_ds(ds_ring_);
      issue_dq<0>(first, shared_.ds(ds_ring_.stage));
    }
    issue_dk(stage, 0);
    if constexpr (makes_dq) {
      wgmma_wait_group<1>();
      pass_dq<0>(first, ds_ring_);  // while dK is computed
    }
    wgmma_wait_group<0>();
    release(shared_.q_empty(stage));
    Scores following;
    if constexpr (makes_dq && dq_parts > 1) {
      // A second part only now: registers would not hold both beside dS.
      DqPart<1> second;
      issue_dq<1>(second, shared_.ds(ds_ring_.stage));
      issue_next_scores(following, ring, message);
      wgmma_wait_group<1>();
      pass_dq<1>(second, ds_ring_);
    } else {
      issue_next_scores(following, ring, message);
    }
    if constexpr (makes_dq) ds_ring_.advance();
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
    take_numbers(next, message);
    weights_.weigh(scores, place_, next.stage, message);
    wgmma_wait_group<0>();
    release(shared_.do_empty(ring.stage));
    // take_do() reads the rows' lse once more if the mask has block lists.
    if constexpr (!isolates) release(shared_.q_empty(next.stage));
    weights_.pack(scores);
  }
  FLASHJIT_FN void take_weights(Scores& scores, const Ring& ring, Message& message) {
    take_numbers(ring, message);
    weights_.weigh(scores, place_, ring.stage, message);
    if constexpr (!isolates) release(shared_.q_empty(ring.stage));
    weights_.pack(scores);
  }

  static constexpr int tile_bytes = tile_rows * 128;  // of a panel
  FLASHJIT_FN Products products() const { return {shared_, warpgroup_}; }
  FLASHJIT_FN void issue_scores(ProductScores& scores, int stage, int tile = 0) const {
    products().issue_scores(scores, stage, tile * tile_bytes);
  }
  FLASHJIT_FN void issue_dp(Scores& dp, int stage, int tile = 0) const {
    products().issue_dp(dp, stage, tile * tile_bytes);
  }
  FLASHJIT_FN void issue_dv(int stage, int tile = 0) {
    products().issue_dv(dv_, weights_.packed(), stage, tile * tile_bytes);
  }
  FLASHJIT_FN void issue_dk(int stage, int tile = 0) {
    products().issue_dk(dk_, weights_.ds(), stage, tile * tile_bytes);
  }
  template <int part>
  FLASHJIT_FN void issue_dq(DqPart<part>& dq, u32 buffer) const {
    products().template issue_dq<part>(dq, buffer);
  }

  // Makes zeros of a tile's rows past the sequence's end.
  template <int panels>
  FLASHJIT_FN void zero_past_the_end(u32 tile, int index) const {
    const int rows = Work(p_, place_).problem.seqlen_q - index * block_m;
    if (rows >= block_m) return;
    zero_rows_from<panels, block_m>(tile, rows);
    fence_proxy_async();
    bar_sync(warpgroup_barrier + warpgroup_, 128);
  }

  const CudaBackwardParams& p_;
  const Shared& shared_;
  u32 place_ = 0, keys_parity_ = 0;
  const int warpgroup_, warp_, lane_;  // the first two by shuffle, so that uniform registers hold them
  float dk_[makes_dk ? Spec::head_dim / 2 : 1], dv_[makes_dv ? Spec::head_dim_v / 2 : 1];
  Weights weights_;
  DsRing ds_ring_;    // where the next dS goes
  int waiting_ = -1;  // the place of the block whose dQ is to be computed, -1 if there is none
};

}  // namespace flashjit::device
