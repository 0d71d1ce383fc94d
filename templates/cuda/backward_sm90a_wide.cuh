// The backward for sm_90a of heads of more than 256 columns: dK and dV of 64 keys are as many sums as the
// registers of a multiprocessor hold. So a block of the grid owns one of the three gradients, of 64 keys or
// 64 rows, and computes the scores again:
//   dV: S^T = K Q^T,                  dV += P^T dO
//   dK: S^T = K Q^T, dP^T = V dO^T,   dK += dS^T Q
//   dQ: S = Q K^T,   dP = dO V^T,     dQ += dS K       (backward_sm90a_wide_dq.cuh)
// These are eight products instead of five. Nothing is added in memory, so every launch gives the same bits.
#pragma once

#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/backward_sm90a_producer.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/backward_sm90a_weights.cuh"
#include "cuda/backward_sm90a_wide_parts.cuh"
#include "cuda/gradient_row.cuh"
#include "cuda/row_bits.cuh"
#include "cuda/row_walk.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

template <class Kernel, int warpgroup>
class Sm90aWideKeysConsumer;

// dK or dV of 64 keys of a key/value head, from all rows of all query heads of its group.
template <class Spec_, class Config_, WideSums sums_>
struct BackwardSm90aWide {
  using Spec = Spec_;
  using Config = Config_;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Products = typename Config::Products;
  static constexpr Sm90aWideLayout layout{sums_, Spec::head_dim, Spec::head_dim_v, Spec::dropout,
                                          ScoreGradient::changes};
  static constexpr int block_m = layout.block, block_n = layout.own, stages = layout.stages;
  static constexpr bool makes_dk = !layout.makes_dv, makes_dq = false, has_places = false,
                        finishes_dq = false;
  static constexpr bool both_stream = layout.makes_dv;  // both warpgroups read the streamed chunks
  static constexpr bool differentiates = ScoreGradient::changes && makes_dk;
  static constexpr bool isolates = isolates_dropped<Mask>, packs_late = false;
  static constexpr int k_panels = ceil_div(Spec::head_dim, layout.panel),
                       v_panels = ceil_div(Spec::head_dim_v, layout.panel);
  static constexpr int held_panels = makes_dk ? k_panels : v_panels,
                       streamed_panels = makes_dk ? v_panels : k_panels;
  static constexpr int word_bytes = 8;  // of dropout, of a row
  static constexpr int own_chunks = wide_own_chunks<Spec>;
  // Whether held rows may have no weights and anything but numbers.
  static constexpr bool clears_held = isolates || ends_within_tensors<Spec>;
  // The rows of a warpgroup's weights: half of a part.
  static constexpr int tile_rows = layout.part_rows / 2;
  using Scores = float[tile_rows / 2];
  using Shared = Sm90aWideShared<BackwardSm90aWide>;
  using Ring = Sm90aRing<stages>;
  template <int warpgroup>
  using Consumer = Sm90aWideKeysConsumer<BackwardSm90aWide, warpgroup>;
  static constexpr bool adds_numbers = true, launches_dependents = true;

  FLASHJIT_FN static u32 first_turn(const Shared&) { return blockIdx.x / 2; }
  FLASHJIT_FN static bool has_place(const CudaBackwardParams&, u32) { return true; }

  // A place's work.
  struct Work {
    Problem problem;  // with the first query head of the group
    Span keys;        // without padding
    int keys_end;     // with padding
    FLASHJIT_FN Work(const CudaBackwardParams& p, u32 place) {
      const auto of_grid = BackwardTurns<Spec, block_n, false, false>(p).key_block(place);
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

   private:
    template <bool padding>
    FLASHJIT_FN static Problem problem_of(const CudaBackwardParams& p, u32 head) {
      const u32 heads_of_entry = static_cast<u32>(p.place_heads);
      return make_problem<Spec::varlen, padding>(p, static_cast<int>(head / heads_of_entry),
                                                 static_cast<int>(head % heads_of_entry) * p.place_group);
    }
  };

  // A thread: copies the keys, and every block of rows that may see them.
  static FLASHJIT_FN void copy(const CudaBackwardParams& p, const BackwardMaps& maps, const Shared& shared) {
    const u32 place = first_turn(shared);
    const Work work(p, place);
    const int batch = Spec::varlen ? 0 : work.problem.batch;
    Ring ring;
    Sm90aWideCopies<BackwardSm90aWide> copies{shared};
    const auto ask = [&](int word, int head) {
      mbarrier_wait(shared.numbers_empty(ring.stage), ring.parity ^ 1);
      st_shared_v2(shared.message(ring.stage), static_cast<u32>(word), static_cast<u32>(head));
      mbarrier_arrive(shared.asked(ring.stage));
      ring.advance();
    };
    if (!work.keys.empty())
      copies.copy_own(maps.k, maps.v, work.problem.first_k + work.keys.begin, work.problem.head_kv, batch);
#pragma unroll 1
    for (int i = work.keys.empty() ? p.place_group : 0; i < p.place_group; ++i) {
      const Problem problem = work.of_head(work.problem.head_q + i);
      const Mask mask(p, problem);
      auto walk = [&] {
        if constexpr (has_row_bits<Mask>)
          return RowBitsWalk(row_bits<Spec>(p, problem, work.keys.begin), p.row_words);
        else
          return RowWalk<Mask, block_m>(mask, work.keys);
      }();
#pragma unroll 1
      for (Block block; walk.next(block);) {
        ask(BackwardMessage::block_word(block.index,
                                        block.whole && work.keys.begin + block_n == work.keys.end),
            problem.head_q);
        copies.copy_block(makes_dk ? maps.q : maps.d_o, makes_dk ? maps.d_o : maps.q,
                          problem.first_q + block.index * block_m, problem.head_q, batch);
      }
    }
    ask(no_more_blocks, 0);
  }

  // A warp: the numbers of the rows that the copying thread asks for.
  static FLASHJIT_FN void add_numbers(const CudaBackwardParams& p, const Shared& shared) {
    Sm90aBackwardProducer<BackwardSm90aWide>::add_rows(p, shared);
  }
};

template <class Kernel, int warpgroup>
class Sm90aWideKeysConsumer : Sm90aWideConsumer<Kernel, warpgroup> {
  using Base = Sm90aWideConsumer<Kernel, warpgroup>;
  using Spec = typename Kernel::Spec;
  using ScoreGradient = typename Kernel::ScoreGradient;
  using Shared = typename Kernel::Shared;
  using Work = typename Kernel::Work;
  using Weights = Sm90aBackwardWeights<Kernel>;
  using Product = typename Base::Product;
  using Base::layout;
  using Base::makes_dv;

 public:
  // Both warpgroups have weights of the same keys.
  FLASHJIT_FN Sm90aWideKeysConsumer(const CudaBackwardParams& p, const Shared& shared)
      : Base(shared), p_(p), weights_(p, shared, 0, this->warp_, this->lane_) {}

  FLASHJIT_FN void run() {
    place_ = Kernel::first_turn(this->shared_);
    this->clear_sums();
    const Work work(p_, place_);
    seqlen_q_ = work.problem.seqlen_q;
    take_keys(work);
    typename Kernel::Ring ring;
#pragma unroll 1
    for (;; ring.advance()) {
      mbarrier_wait(this->shared_.numbers_full(ring.stage), ring.parity);
      const BackwardMessage message = this->shared_.read_message(ring.stage);
      if (message.ends()) break;
      if constexpr (makes_dv)
        add_to_dv(ring.stage, message);
      else
#pragma unroll 1
        for (int part = 0; part < layout.parts; ++part) add_to_dk(ring.stage, message, part);
      __syncwarp();
      this->release(this->shared_.numbers_empty(ring.stage));
    }
    write_sums(Work(p_, place_));
    if constexpr (!makes_dv && ScoreGradient::changes) weights_.flush_terms();
  }

 private:
  FLASHJIT_FN void take_keys(const Work& work) {
    if (work.keys.empty()) return;
    mbarrier_wait(this->shared_.own_full(), 0);
    if (ends_within_tensors<Spec> && work.keys.size() < layout.own) {
      if constexpr (warpgroup == 0)
        zero_rows_from<Kernel::k_panels, layout.own>(this->shared_.first(), work.keys.size());
      if constexpr (warpgroup == 1 && !makes_dv)
        zero_rows_from<Kernel::v_panels, layout.own>(this->shared_.second(), work.keys.size());
      fence_proxy_async();
    }
    if (makes_dv && ends_within_tensors<Spec>)
      this->meet(0);  // both read the first operand
    else if (ends_within_tensors<Spec>)
      bar_sync(Base::own_barrier, 128);
    this->take_own();
    weights_.take_keys(work);
  }
  FLASHJIT_FN void add_to_dk(int stage, const BackwardMessage& message, int part) {
    Product product;
    this->multiply(product);
    if constexpr (ends_within_tensors<Spec>)
      this->clear_from(product, seqlen_q_ - message.index() * layout.block - part * layout.part_rows);
    float scores[layout.product_rows / 4], dp[layout.product_rows / 4];
    this->exchange(product, scores, dp);
    const int sixteen = part * 2 + warpgroup;
    if constexpr (ScoreGradient::changes) {
      weights_.differentiate(scores, dp, place_, stage, message, sixteen);
    } else {
      weights_.weigh(scores, place_, stage, message, sixteen);
      weights_.make_ds(scores, dp, stage, message, sixteen);
    }
    clear_rows_without_weights(stage, part * layout.part_rows, 0);
    typename Base::AllWeights ds;
    this->pass_weights(weights_.ds(), ds);
    this->add(ds);
  }
  FLASHJIT_FN void add_to_dv(int stage, const BackwardMessage& message) {
    Product scores;
    this->multiply(scores);
    if constexpr (ends_within_tensors<Spec>)
      this->clear_from(scores, seqlen_q_ - message.index() * layout.block - warpgroup * layout.product_rows);
    weights_.weigh(scores, place_, stage, message, warpgroup);
    weights_.pack(scores);
#pragma unroll
    for (int first = 0; first < layout.block; first += 32) clear_rows_without_weights(stage, first, first);
    typename Base::AllWeights weights;
    this->pass_weights(weights_.packed(), weights, 1 - buffer_, buffer_);
    this->add(weights);
    buffer_ ^= 1;
  }
  // Zeros for 32 held rows without weights: 0 times NaN is NaN. first: in the block; held: in the part.
  FLASHJIT_FN void clear_rows_without_weights(int stage, int first, int held) const {
    if constexpr (Kernel::clears_held) {
      float lse[2];
      const u32 lane = this->lane_;
      ld_shared_v2(lse[0], lse[1], this->shared_.lse(stage) + (first + lane / 2 * 2) * 4);
      this->clear_held(__ballot_sync(0xffffffff, has_no_weights(lse[lane % 2])), held);
    }
  }
  FLASHJIT_FN void write_sums(const Work& work) const {
    const TensorView& t = makes_dv ? p_.dv : p_.dk;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = work.keys.begin + this->warp_ * 16 + this->lane_ / 4 + 8 * r;
      const float factor = key < work.keys.end ? (makes_dv ? p_.dv_scale : p_.scale) : 0;
      this->template write<Spec::batch_invariant>(
          static_cast<typename Kernel::Gradient*>(t.data) + work.problem.k_offset(t) + key * t.row_stride, r,
          factor, key < work.keys_end);
    }
  }

  const CudaBackwardParams& p_;
  Weights weights_;
  u32 place_ = 0;
  int seqlen_q_ = 0;
  int buffer_ = 0;  // of dV's weights
};

// Blocks of the grid make either in turns.
template <class Spec, class Config>
FLASHJIT_FN void backward_sm90a_wide(const CudaBackwardParams& params, const BackwardMaps& maps) {
  if (blockIdx.x % 2 == 0)
    run_wide<BackwardSm90aWide<Spec, Config, WideSums::dk>>(params, maps);
  else
    run_wide<BackwardSm90aWide<Spec, Config, WideSums::dv>>(params, maps);
}

}  // namespace flashjit::device
