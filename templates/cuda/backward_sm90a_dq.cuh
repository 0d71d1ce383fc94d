// dQ of sm_90a's backward by a kernel of its own: a block of the grid owns 128 rows of a query head and walks
// their blocks of keys, so that dQ is a sum in registers:
//   S = Q K^T        dP = dO V^T        dQ += dS K, with dS from registers
#pragma once

#include "cuda/backward_sm90a_rows.cuh"
#include "cuda/gradient_row.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/tile_rows.cuh"

namespace flashjit::device {

template <class Spec_, class Config_>
struct BackwardDqSm90a {
  using Spec = Spec_;
  using Config = Config_;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Products = typename Config::DqProducts;
  static constexpr Sm90aDqLayout layout{Spec::head_dim, Spec::head_dim_v, Spec::dropout};
  static constexpr int block_m = layout.rows, block_n = layout.keys, stages = layout.stages;
  static constexpr int consumers = layout.consumers;
  static constexpr int k_panels = ceil_div(Spec::head_dim, Sm90aBackwardLayout::panel);
  static constexpr int v_panels = ceil_div(Spec::head_dim_v, Sm90aBackwardLayout::panel);
  using Ring = Sm90aRing<stages>;
  using Work = QueryBlock<Spec, block_m>;
  using Rows = TileRows<block_m, false>;

  static constexpr int warpgroup_barrier = 1;         // + consumer: the named barrier of its four warps
  static constexpr int keys_barrier = 1 + consumers;  // of all consumers
  static constexpr bool isolates = isolates_dropped<Mask>;

  struct Shared {
    const char* memory;
    u32 start;
    FLASHJIT_FN u32 q() const { return start + layout.q; }
    FLASHJIT_FN u32 d_o() const { return start + layout.d_o; }
    FLASHJIT_FN u32 k(int stage) const { return start + layout.k + stage * layout.k_bytes; }
    FLASHJIT_FN u32 v(int stage) const { return start + layout.v + stage * layout.v_bytes; }
    FLASHJIT_FN u32 words(int stage) const { return start + layout.words + stage * (block_n * 4); }
    FLASHJIT_FN u32 message(int stage) const {
      return start + layout.messages + stage * Sm90aBackwardLayout::message_bytes;
    }
    FLASHJIT_FN BackwardMessage read_message(int stage) const {
      return reinterpret_cast<const BackwardMessage*>(memory + layout.messages)[stage];
    }
    FLASHJIT_FN Words dropout_key() const {
      return *reinterpret_cast<const Words*>(memory + layout.dropout_key);
    }
    FLASHJIT_FN u32 barrier(int i) const {
      return start + layout.barriers + i * Sm90aBackwardLayout::barrier_bytes;
    }
    FLASHJIT_FN u32 q_full() const { return barrier(0); }  // Q and dO
    FLASHJIT_FN u32 k_full(int stage) const { return barrier(1 + 4 * stage); }
    FLASHJIT_FN u32 v_full(int stage) const { return barrier(2 + 4 * stage); }
    FLASHJIT_FN u32 empty(int stage) const { return barrier(3 + 4 * stage); }  // K and V
    FLASHJIT_FN u32 asked(int stage) const { return barrier(4 + 4 * stage); }
    FLASHJIT_FN u32 numbers_full(int stage) const { return k_full(stage); }  // dropout's words come with K
  };

  static FLASHJIT_FN void copy(const CudaBackwardParams& p, const BackwardMaps& maps, const Shared& shared) {
    const Work work(p);
    const int batch = Spec::varlen ? 0 : work.problem.batch;
    Ring ring;
    if (!work.rows.empty()) {
      const int row = work.problem.first_q + work.rows.begin;
      mbarrier_arrive_expect_tx(shared.q_full(), layout.q_bytes + layout.do_bytes);
      copy_tile<k_panels, block_m>(shared.q(), maps.q, shared.q_full(), row, work.problem.head_q, batch);
      copy_tile<v_panels, block_m>(shared.d_o(), maps.d_o, shared.q_full(), row, work.problem.head_q, batch);
      const Mask mask(p, work.problem);
      BlockWalk<Keys, Mask> walk(mask, work.rows, block_n);
#pragma unroll 1
      for (Block block; walk.next(block);) {
        const int stage = ring.stage, key = work.problem.first_k + block.index * block_n;
        mbarrier_wait(shared.empty(stage), ring.parity ^ 1);
        st_message(shared.message(stage), BackwardMessage::block_word(block.index, block.whole), block.found,
                   0);
        if constexpr (Spec::dropout) mbarrier_arrive(shared.asked(stage));
        mbarrier_arrive_expect_tx(shared.k_full(stage), layout.k_bytes);
        copy_tile<k_panels, block_n>(shared.k(stage), maps.k, shared.k_full(stage), key, work.problem.head_kv,
                                     batch);
        mbarrier_arrive_expect_tx(shared.v_full(stage), layout.v_bytes);
        copy_tile<v_panels, block_n>(shared.v(stage), maps.v, shared.v_full(stage), key, work.problem.head_kv,
                                     batch);
        ring.advance();
      }
    }
    mbarrier_wait(shared.empty(ring.stage), ring.parity ^ 1);
    st_message(shared.message(ring.stage), no_more_blocks, 0, 0);
    if constexpr (Spec::dropout) mbarrier_arrive(shared.asked(ring.stage));
    mbarrier_arrive(shared.k_full(ring.stage));
  }

  // A warpgroup: it computes dQ of 64 rows.
  class Consumer {
   public:
    FLASHJIT_FN Consumer(const CudaBackwardParams& p, const Shared& shared)
        : p_(p),
          shared_(shared),
          warpgroup_(__shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1),
          warp_(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0)),
          lane_(threadIdx.x % 32) {}

    FLASHJIT_FN void run() {
      griddepcontrol_wait();  // an earlier step makes lse and delta
      const Work work(p_);
#pragma unroll
      for (float& x : dq_) x = 0;
      if (!work.rows.empty()) take_rows(work);
      const Mask mask(p_, work.problem);
      for (Ring ring;; ring.advance()) {
        mbarrier_wait(shared_.k_full(ring.stage), ring.parity);
        const BackwardMessage message = shared_.read_message(ring.stage);
        if (message.ends()) break;
        add(work, mask, ring, message);
      }
      write_gradients(work);
    }

   private:
    FLASHJIT_FN int first_row() const { return warpgroup_ * 64 + warp_ * 16; }

    FLASHJIT_FN void take_rows(const Work& work) {
      const i64 first = workspace_row<Spec>(p_, work.problem) + work.rows.begin + first_row() + lane_ / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse_[r] = p_.lse_log2[first + 8 * r];
        delta_[r] = p_.delta[first + 8 * r];
        far_max_[r] = p_.far_max[first + 8 * r];
        if constexpr (Spec::dropout)
          row_words_[r] = row_words_at<typename Spec::Offsets>(
              p_, shared_.dropout_key(), work.rows.begin + first_row() + lane_ / 4 + 8 * r,
              work.problem.head_q, work.problem.batch);
      }
      any_far_ = __any_sync(0xffffffff, far_max_[0] != 0 || far_max_[1] != 0);
      mbarrier_wait(shared_.q_full(), 0);
    }

    FLASHJIT_FN void add(const Work& work, const Mask& mask, const Ring& ring,
                         const BackwardMessage& message) {
      const int stage = ring.stage;
      mbarrier_wait(shared_.v_full(stage), ring.parity);
      if constexpr (ends_within_tensors<Spec>) {
        const int keys = work.problem.seqlen_k - message.index() * block_n;
        if (keys < block_n) {
          zero_rows_from<k_panels, block_n>(shared_.k(stage), keys);
          zero_rows_from<v_panels, block_n>(shared_.v(stage), keys);
          fence_proxy_async();
          bar_sync(warpgroup_barrier + warpgroup_, 128);
        }
      }
      const u32 own_rows = warpgroup_ * (64 * 128);
      float scores[block_n / 2], dp[block_n / 2];
      wgmma_fence();
      Products::s(scores, wgmma_descriptor(shared_.q() + own_rows, 0),
                  wgmma_descriptor(shared_.k(stage), layout.k_panel));
      wgmma_commit_group();
      wgmma_fence();
      Products::dp(dp, wgmma_descriptor(shared_.d_o() + own_rows, 0),
                   wgmma_descriptor(shared_.v(stage), layout.k_panel));
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if constexpr (isolates) clear_bad_keys(scores, shared_.k(stage));
      const typename Rows::Positions rows{work.rows.begin + first_row() + lane_ / 4};
      const Block block{message.index(), message.whole(), message.second};
      if (!block.whole) {
        if constexpr (has_formula<Mask>)
          mask_elements<block_m, block_n>(
              scores, mask, rows, [&](int) { return work.problem.head_q; }, block, lane_);
        else
          mask_scores<block_m, block_n>(scores, mask, rows, block, lane_);
      }
      if constexpr (!Score::changes) {
        if (any_far_) {
#pragma unroll
          for (int i = 0; i < block_n / 2; ++i) scores[i] = below_far_max(scores[i], far_max_[i / 2 % 2]);
        }
#pragma unroll
        for (int i = 0; i < block_n / 2; ++i)
          scores[i] = ex2_approx(__fmaf_rn(scores[i], p_.scale_log2, -lse_[i / 2 % 2]));
      }
      wgmma_wait_group<0>();
#pragma unroll
      for (int step = 0; step < block_n / 16; ++step) {
        u32 words[4];
        if constexpr (Spec::dropout) ld_column_words(words, shared_.words(stage), step, lane_);
        float ds[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float x = dp[8 * step + i];
          if constexpr (Spec::dropout)
            x = dropped(row_words_[i / 2 % 2], words[i / 4 * 2 + i % 2], p_.dropout.below) ? 0
                : ScoreGradient::changes ? x * p_.dropout.scale
                                         : x;
          if constexpr (Score::changes) {
            ds[i] = ScoreGradient::of_pair(p_, work.problem, rows(i / 2 % 2 * 8),
                                           block.index * block_n + lane_ % 4 * 2,
                                           16 * step + i / 4 * 8 + i % 2, scores[8 * step + i],
                                           lse_[i / 2 % 2], far_max_[i / 2 % 2], x, delta_[i / 2 % 2]);
            continue;
          }
          ds[i] = scores[8 * step + i] * (x - delta_[i / 2 % 2]);
          if (isolates && scores[8 * step + i] == 0) ds[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) ds_[step][i] = cvt_rn_x2(Element{}, ds[2 * i], ds[2 * i + 1]);
      }
      wgmma_fence();
      Products::dq(dq_, ds_, wgmma_descriptor(shared_.k(stage), layout.k_panel), 1);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      mbarrier_arrive_if(lane_ == 0, shared_.empty(stage));
    }

    // Makes zeros of keys whose K is not finite. No row's score with such a key is finite, so either all
    // warps find one or none does.
    FLASHJIT_FN void clear_bad_keys(const float (&scores)[block_n / 2], u32 tile) const {
      float sum = 0;
#pragma unroll
      for (const float score : scores) sum = __fmaf_rn(score, 0, sum);
      if (!__any_sync(0xffffffff, sum != 0)) return;
      const u32 lane = lane_;
      const RowOfTile<Element, PanelTile<k_panels, block_n>> k{tile, 0, 1};
      if (!k.any_bad(block_n, lane)) return;
      bar_sync(keys_barrier, consumers * 128);  // everybody has its scores and has found the keys
      k.clear_bad(block_n, lane);
      fence_proxy_async();
      bar_sync(keys_barrier, consumers * 128);
    }

    FLASHJIT_FN void write_gradients(const Work& work) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = work.rows.begin + first_row() + lane_ / 4 + 8 * r;
        const bool valid = row < work.rows.end && lse_[r] != -minus_infinity;
        Gradient* const to =
            static_cast<Gradient*>(p_.dq.data) + work.problem.q_offset(p_.dq) + row * p_.dq.row_stride;
        write_gradient<Spec::batch_invariant>(to, dq_, r, valid ? p_.scale : 0, row < work.rows_end,
                                              lane_ % 4);
      }
    }

    const CudaBackwardParams& p_;
    const Shared& shared_;
    const int warpgroup_, warp_, lane_;  // the first two by shuffle, so that uniform registers hold them
    float dq_[Spec::head_dim / 2];
    u32 ds_[block_n / 16][4];
    float lse_[2], delta_[2], far_max_[2];
    bool any_far_;
    RowWords row_words_[2];  // with dropout
  };

  static FLASHJIT_FN void run(const CudaBackwardParams& p, const BackwardMaps& maps) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    const Shared shared{dynamic_shared, shared_address(dynamic_shared)};
    if (threadIdx.x == 0) {
      mbarrier_init(shared.q_full(), 1);
      for (int stage = 0; stage < stages; ++stage) {
        mbarrier_init(shared.k_full(stage), Spec::dropout ? 2 : 1);
        mbarrier_init(shared.v_full(stage), 1);
        mbarrier_init(shared.empty(stage), 4 * consumers);
        if (Spec::dropout) mbarrier_init(shared.asked(stage), 1);
      }
      fence_mbarrier_init();
    }
    if (Spec::dropout && threadIdx.x == 32)
      *reinterpret_cast<Words*>(dynamic_shared + layout.dropout_key) = dropout_key(p.dropout);
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dec<40>();
      if (threadIdx.x == 0) {
        copy(p, maps, shared);
      } else if (Spec::dropout && threadIdx.x / 32 == 1) {
        make_column_words<BackwardDqSm90a>(p, shared);
      }
    } else {
      setmaxnreg_inc<232>();
      Consumer(p, shared).run();
    }
  }
};

template <class Spec, class Config>
FLASHJIT_FN void backward_dq_sm90a(const CudaBackwardParams& params, const BackwardMaps& maps) {
  BackwardDqSm90a<Spec, Config>::run(params, maps);
}

}  // namespace flashjit::device
