// dQ of 64 rows of a query head, of more than 256 columns or beside values of as many, from all keys that the
// rows see (backward_sm90a_wide.cuh).
#pragma once

#include "cuda/backward_sm90a_rows.cuh"
#include "cuda/backward_sm90a_wide_parts.cuh"
#include "cuda/gradient_row.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/tile_rows.cuh"

namespace flashjit::device {

template <class Kernel, int warpgroup>
class Sm90aWideRowsConsumer;

template <class Spec_, class Config_>
struct BackwardDqSm90aWide {
  using Spec = Spec_;
  using Config = Config_;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Products = typename Config::Products;
  static constexpr Sm90aWideLayout layout{WideSums::dq, Spec::head_dim, Spec::head_dim_v, Spec::dropout,
                                          false};
  static constexpr int block_m = layout.own, block_n = layout.block, stages = layout.stages;
  static constexpr bool both_stream = false;
  static constexpr int held_panels = ceil_div(Spec::head_dim, layout.panel),
                       streamed_panels = ceil_div(Spec::head_dim_v, layout.panel);
  static constexpr int word_bytes = 4;  // of dropout, of a key
  static constexpr bool isolates = isolates_dropped<Mask>,
                        clears_held = isolates || ends_within_tensors<Spec>;
  static constexpr int own_chunks = wide_own_chunks<Spec>;
  using Shared = Sm90aWideShared<BackwardDqSm90aWide>;
  using Ring = Sm90aRing<stages>;
  using Work = QueryBlock<Spec, block_m>;
  template <int warpgroup>
  using Consumer = Sm90aWideRowsConsumer<BackwardDqSm90aWide, warpgroup>;
  static constexpr bool adds_numbers = Spec::dropout, launches_dependents = false;

  static FLASHJIT_FN void copy(const CudaBackwardParams& p, const BackwardMaps& maps, const Shared& shared) {
    const Work work(p);
    const int batch = Spec::varlen ? 0 : work.problem.batch;
    Ring ring;
    const auto tell = [&](int word, int found) {
      mbarrier_wait(shared.numbers_empty(ring.stage), ring.parity ^ 1);
      st_message(shared.message(ring.stage), word, found, 0);
      if constexpr (Spec::dropout)
        mbarrier_arrive(shared.asked(ring.stage));
      else
        mbarrier_arrive(shared.numbers_full(ring.stage));
      ring.advance();
    };
    if (!work.rows.empty()) {
      Sm90aWideCopies<BackwardDqSm90aWide> copies{shared};
      copies.copy_own(maps.q, maps.d_o, work.problem.first_q + work.rows.begin, work.problem.head_q, batch);
      const Mask mask(p, work.problem);
      BlockWalk<Keys, Mask> walk(mask, work.rows, block_n);
#pragma unroll 1
      for (Block block; walk.next(block);) {
        tell(BackwardMessage::block_word(block.index, block.whole), 0);
        copies.copy_block(maps.k, maps.v, work.problem.first_k + block.index * block_n, work.problem.head_kv,
                          batch);
      }
    }
    tell(no_more_blocks, 0);
  }

  static FLASHJIT_FN void add_numbers(const CudaBackwardParams& p, const Shared& shared) {
    make_column_words<BackwardDqSm90aWide>(p, shared);
  }
};

template <class Kernel, int warpgroup>
class Sm90aWideRowsConsumer : Sm90aWideConsumer<Kernel, warpgroup> {
  using Base = Sm90aWideConsumer<Kernel, warpgroup>;
  using Spec = typename Kernel::Spec;
  using Element = typename Kernel::Element;
  using Mask = typename Kernel::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Shared = typename Kernel::Shared;
  using Work = typename Kernel::Work;
  using Product = typename Base::Product;
  using Rows = TileRows<Kernel::block_m, false>;
  using Base::layout;
  static constexpr bool isolates = Kernel::isolates;
  static constexpr int keys = layout.product_rows / 2;  // whose dS the warpgroup makes
  using Scores = float[keys / 2];

 public:
  FLASHJIT_FN Sm90aWideRowsConsumer(const CudaBackwardParams& p, const Shared& shared)
      : Base(shared), p_(p) {}

  FLASHJIT_FN void run() {
    griddepcontrol_wait();  // an earlier step makes lse and delta
    const Work work(p_);
    this->clear_sums();
    if (!work.rows.empty()) take_rows(work);
    const Mask mask(p_, work.problem);
    typename Kernel::Ring ring;
#pragma unroll 1
    for (;; ring.advance()) {
      mbarrier_wait(this->shared_.numbers_full(ring.stage), ring.parity);
      const BackwardMessage message = this->shared_.read_message(ring.stage);
      if (message.ends()) break;
#pragma unroll 1
      for (int part = 0; part < layout.parts; ++part) add(work, mask, ring.stage, message, part);
      __syncwarp();
      this->release(this->shared_.numbers_empty(ring.stage));
    }
    write_sums(work);
  }

 private:
  FLASHJIT_FN int first_row() const { return this->warp_ * 16 + this->lane_ / 4; }

  FLASHJIT_FN void take_rows(const Work& work) {
    const i64 first = workspace_row<Spec>(p_, work.problem) + work.rows.begin + first_row();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_[r] = p_.lse_log2[first + 8 * r];
      delta_[r] = p_.delta[first + 8 * r];
      far_max_[r] = p_.far_max[first + 8 * r];
      if constexpr (Spec::dropout)
        row_words_[r] = row_words_at<typename Spec::Offsets>(p_, this->shared_.dropout_key(),
                                                             work.rows.begin + first_row() + 8 * r,
                                                             work.problem.head_q, work.problem.batch);
    }
    any_far_ = __any_sync(0xffffffff, far_max_[0] != 0 || far_max_[1] != 0);
    mbarrier_wait(this->shared_.own_full(), 0);
    this->take_own();
  }

  FLASHJIT_FN void add(const Work& work, const Mask& mask, int stage, const BackwardMessage& message,
                       int part) {
    Product product;
    this->multiply(product);
    const int first_key = message.index() * layout.block + part * layout.part_rows;
    if constexpr (ends_within_tensors<Spec>) this->clear_from(product, work.problem.seqlen_k - first_key);
    Scores scores, dp;
    this->exchange(product, scores, dp);
    if constexpr (isolates) clear_bad_keys(scores);
    const int sixteen = part * 2 + warpgroup;  // of the block's keys
    const typename Rows::Positions rows{work.rows.begin + first_row()};
    if (!message.whole()) {
      const int key = first_key + warpgroup * keys;
      const Block block{
          key / keys, false,
          mask.look_up({work.rows.begin, work.rows.begin + Kernel::block_m}, {key, key + keys})};
      if constexpr (has_formula<Mask>)
        mask_elements<Kernel::block_m, keys>(
            scores, mask, rows, [&](int) { return work.problem.head_q; }, block, this->lane_);
      else
        mask_scores<Kernel::block_m, keys>(scores, mask, rows, block, this->lane_);
    }
    u32 own[1][4];
    make_ds(own[0], work, scores, dp, rows, stage, sixteen, message.index() * layout.block);
    if constexpr (ends_within_tensors<Spec>) {
      const int left = work.problem.seqlen_k - first_key;
      if (left < layout.part_rows) this->clear_held(~low_bits(left), 0);
    }
    typename Base::AllWeights ds;
    this->pass_weights(own, ds);
    Base::add(ds);
  }
  FLASHJIT_FN void make_ds(u32 (&packed)[4], const Work& work, Scores& scores, const Scores& dp,
                           const typename Rows::Positions& rows, int stage, int sixteen,
                           int block_key) const {
    if constexpr (!Score::changes) {
      if (any_far_) {
#pragma unroll
        for (int i = 0; i < keys / 2; ++i) scores[i] = below_far_max(scores[i], far_max_[i / 2 % 2]);
      }
#pragma unroll
      for (int i = 0; i < keys / 2; ++i)
        scores[i] = ex2_approx(__fmaf_rn(scores[i], p_.scale_log2, -lse_[i / 2 % 2]));
    }
    u32 words[4];
    if constexpr (Spec::dropout) ld_column_words(words, this->shared_.words(stage), sixteen, this->lane_);
    float ds[keys / 2];
#pragma unroll
    for (int i = 0; i < keys / 2; ++i) {
      float x = dp[i];
      if constexpr (Spec::dropout)
        x = dropped(row_words_[i / 2 % 2], words[i / 4 * 2 + i % 2], p_.dropout.below) ? 0
            : ScoreGradient::changes                                                   ? x * p_.dropout.scale
                                                                                       : x;
      if constexpr (Score::changes) {
        ds[i] = ScoreGradient::of_pair(p_, work.problem, rows(i / 2 % 2 * 8),
                                       block_key + sixteen * keys + this->lane_ % 4 * 2, i / 4 * 8 + i % 2,
                                       scores[i], lse_[i / 2 % 2], far_max_[i / 2 % 2], x, delta_[i / 2 % 2]);
        continue;
      }
      ds[i] = scores[i] * (x - delta_[i / 2 % 2]);
      if (isolates && scores[i] == 0) ds[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = cvt_rn_x2(Element{}, ds[2 * i], ds[2 * i + 1]);
  }

  // Makes zeros of those of the warpgroup's keys whose K is not finite. No row's score with such a key is
  // finite. All scores have been computed.
  FLASHJIT_FN void clear_bad_keys(const Scores& scores) const {
    float sum = 0;
#pragma unroll
    for (const float score : scores) sum = __fmaf_rn(score, 0, sum);
    if (!__any_sync(0xffffffff, sum != 0)) return;
    using Tile = RowOfTile<Element, PanelTile<1, layout.part_rows>>;
    const u32 lane = this->lane_, row = warpgroup * keys + lane % 16;
    // A lane has a panel of each chunk.
    const auto has = [&](int chunk) { return chunk * 2 + static_cast<int>(lane / 16) < Kernel::held_panels; };
    float bad = 0;
    this->template for_held<true>([&](int chunk, u32 tile) {
      if (has(chunk)) bad += Tile{tile + lane / 16 * layout.held_panel, 0, 1}.zero_or_nan(row);
    });
    bad += __shfl_xor_sync(0xffffffff, bad, 16);
    this->template for_held<true>([&](int chunk, u32 tile) {
      if (has(chunk) && bad != 0) Tile{tile + lane / 16 * layout.held_panel, 0, 1}.clear(row);
    });
  }

  FLASHJIT_FN void write_sums(const Work& work) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.rows.begin + first_row() + 8 * r;
      const bool valid = row < work.rows.end && lse_[r] != -minus_infinity;
      this->template write<Spec::batch_invariant>(static_cast<typename Kernel::Gradient*>(p_.dq.data) +
                                                      work.problem.q_offset(p_.dq) + row * p_.dq.row_stride,
                                                  r, valid ? p_.scale : 0, row < work.rows_end);
    }
  }

  const CudaBackwardParams& p_;
  float lse_[2], delta_[2], far_max_[2];
  bool any_far_;
  RowWords row_words_[2];  // with dropout
};

template <class Spec, class Config>
FLASHJIT_FN void backward_dq_sm90a_wide(const CudaBackwardParams& params, const BackwardMaps& maps) {
  run_wide<BackwardDqSm90aWide<Spec, Config>>(params, maps);
}

}  // namespace flashjit::device
