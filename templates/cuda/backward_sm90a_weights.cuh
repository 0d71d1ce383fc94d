// Weights and dS of sm_90a's backward: a consumer's scores become P^T, its dP becomes dS^T, with masks,
// formulas and dropout. Both stay in registers, as the first operands of dV's and dK's products.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/backward_sm90a_mask.cuh"
#include "cuda/backward_sm90a_parts.cuh"
#include "cuda/dropout.cuh"
#include "cuda/formula_gradient.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

// Registers 4 i ... 4 i + 3 of a thread hold rows 8 i + 2 (lane % 4) and the next one: first of key
// lane / 4, then of key lane / 4 + 8.
template <class Kernel>
class Sm90aBackwardWeights {
  using Spec = typename Kernel::Spec;
  using Element = typename Kernel::Element;
  using Mask = typename Kernel::Mask;
  using Score = typename Kernel::Score;
  using ScoreGradient = typename Kernel::ScoreGradient;
  using Shared = typename Kernel::Shared;
  using Work = typename Kernel::Work;
  using Scores = typename Kernel::Scores;
  using Message = BackwardMessage;
  static constexpr auto layout = Kernel::layout;
  static constexpr int block_m = Kernel::block_m, block_n = Kernel::block_n;
  static constexpr int k_panels = Kernel::k_panels;
  static constexpr int tile_rows = Kernel::tile_rows;
  static constexpr int steps = tile_rows / 16;  // of the products over a tile's rows
  static constexpr bool isolates = Kernel::isolates, packs_late = Kernel::packs_late;
  static constexpr bool clears_keys = isolates && Kernel::makes_dq;  // also in K, which dQ's product reads
  // differentiate() leaves dropped weights as they are, weigh() marks them.
  static constexpr bool differentiates = Kernel::differentiates;

 public:
  FLASHJIT_FN Sm90aBackwardWeights(const CudaBackwardParams& p, const Shared& shared, int warpgroup, int warp,
                                   int lane)
      : p_(p), shared_(shared), warpgroup_(warpgroup), warp_(warp), lane_(lane) {}

  // Operands of dV's and dK's products, in 16 bits.
  using Operand = u32[steps][4];
  FLASHJIT_FN const Operand& packed() const { return packed_; }
  FLASHJIT_FN const Operand& ds() const { return ds_; }

  // Begins a place, whose keys are in shared memory.
  FLASHJIT_FN void take_keys(const Work& work) {
    if constexpr (clears_keys) bad_keys_ = unknown_keys;
    if constexpr (Spec::dropout) make_column_words(work);
  }
  // Scores of a tile become weights. A row without keys has an lse of infinity here, so its weights are 0.
  FLASHJIT_FN void weigh(Scores& scores, u32 place, int stage, const Message& message, int tile = 0) {
    const int at = tile * tile_rows;
    if constexpr (clears_keys) clear_bad_keys(scores);
    if constexpr (Score::changes)
      ScoreGradient::template modify<tile_rows>(
          scores, pairs(place, Work(p_, place).of_head(message.second), message.index() * block_m + at));
    if (!message.whole()) {
      if constexpr (!isolates) mask_scores(scores, place, message, tile, minus_infinity);
      if (message.far()) subtract_far_max(scores, stage, at);
    }
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
    if (isolates && !message.whole()) mask_scores(scores, place, message, tile, 0);
    if constexpr (Spec::dropout) mark_dropped(scores, stage, tile);
  }
  // dP^T becomes dS^T, in the form of an operand. Where the mask drops pairs whose V may be anything, dS of
  // a weight of 0 is 0.
  FLASHJIT_FN void make_ds(const Scores& scores, const Scores& dp, int stage, const Message& message,
                           int tile = 0) {
    if (isolates && !message.whole())
      make_ds<true>(scores, dp, stage, tile);
    else
      make_ds<false>(scores, dp, stage, tile);
  }
  // Both at once, where formulas have derivatives: scores become weights, dP becomes dS.
  FLASHJIT_FN void differentiate(Scores& scores, Scores& dp, u32 place, int stage, const Message& message,
                                 int tile = 0) {
    const int at = tile * tile_rows;
    if constexpr (clears_keys) clear_bad_keys(scores);
    if (!message.whole()) mask_scores(scores, place, message, tile, minus_infinity);
    drop_bad_keys(scores);
    if constexpr (Spec::dropout) find_dropped(stage, tile);
    const u32 own = at * 4 + lane_ % 4 * 8;
    ScoreGradient::template differentiate<tile_rows>(
        p_, scores, dp, pairs(place, Work(p_, place).of_head(message.second), message.index() * block_m + at),
        terms_,
        [&](int i, float(&lse)[2], float(&delta)[2], float(&far_max)[2]) {
          ld_shared_v2(lse[0], lse[1], shared_.lse(stage) + own + i * 32);
          ld_shared_v2(delta[0], delta[1], shared_.delta(stage) + own + i * 32);
          ld_shared_v2(far_max[0], far_max[1], shared_.far_max(stage) + own + i * 32);
        },
        [&](int index, float product) {
          if constexpr (Spec::dropout) return is_dropped(index) ? 0 : product * p_.dropout.scale;
          return product;
        });
#pragma unroll
    for (int i = 0; i < tile_rows / 4; ++i)
      ds_[i / 4][i % 4] = cvt_rn_x2(Element{}, dp[2 * i], dp[2 * i + 1]);
  }
  // Weights become dV's operand. A thread holds the same elements of an accumulator and of operand A.
  FLASHJIT_FN void pack(const Scores& scores) {
#pragma unroll
    for (int i = 0; i < tile_rows / 8; ++i) pack(scores, i);
  }
  // dS^T of a tile to shared memory, as rows of 64 keys: a panel for each consumer.
  FLASHJIT_FN void store_ds(u32 tile) const {
    const int matrix = lane_ / 8, row = matrix / 2 * 8 + lane_ % 8, chunk = warp_ * 2 + matrix % 2;
    const u32 to = tile + warpgroup_ * layout.q_panel + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int step = 0; step < steps; ++step) stmatrix_x4_trans(to + step * (16 * 128), ds_[step]);
    fence_proxy_async();
  }
  // Adds the gradients of learned tables to those in memory.
  FLASHJIT_FN void flush_terms() {
    constexpr u32 place = 0;  // any
    ScoreGradient::flush(p_, pairs(place, Work(p_, place).problem, 0), terms_);
  }

 private:
  // far_max of the thread's rows of a tile, from its first one on.
  FLASHJIT_FN const float* far_max_of(int stage, int first_row) const {
    // The place from shared memory once more, so that no register holds it until then.
    const int place = shared_.read_message(stage).place;
    return p_.far_max + static_cast<i64>(place) * place_rows + first_row + lane_ % 4 * 2;
  }
  FLASHJIT_FN void subtract_far_max(Scores& scores, int stage, int first_row) const {
    constexpr int rows = min(32, tile_rows);  // at once: with all loads at once registers spill
    const float* const far_max = far_max_of(stage, first_row);
#pragma unroll
    for (int first = 0; first < tile_rows; first += rows) {
      __syncwarp();
      device::subtract_far_max<rows>(scores + first / 2, far_max + first);
    }
  }
  FLASHJIT_FN int first_key() const { return warpgroup_ * layout.warpgroup_keys + warp_ * 16; }
  // The words of the thread's two keys.
  FLASHJIT_FN void make_column_words(const Work& work) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key =
          work.keys.begin + first_key() + lane_ / 4 + 8 * r + Spec::Offsets::of_keys(p_, work.problem.batch);
      const Words words = dropout_column_words(shared_.dropout_key(), key / 4, work.problem.batch);
      const int at = key % 4;
      column_words_[r] = at == 0 ? words.x[0] : at == 1 ? words.x[1] : at == 2 ? words.x[2] : words.x[3];
    }
  }
  // By a place's first scores: finds keys whose K is not finite among the thread's two, and makes it zeros.
  // All scores of such a key are infinite or NaN. No warp reads K of another's keys before it has this
  // block's dS.
  FLASHJIT_FN void clear_bad_keys(const Scores& scores) {
    if (bad_keys_ != unknown_keys) return;
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
  FLASHJIT_FN void drop_bad_keys(Scores& scores) const {
    if (clears_keys && bad_keys_) {
#pragma unroll
      for (int i = 0; i < tile_rows / 2; ++i)
        if (bad_keys_ >> i / 2 % 2 & 1) scores[i] = minus_infinity;
    }
  }
  // Gives `value` to the pairs that the mask drops.
  FLASHJIT_FN void mask_scores(Scores& scores, u32 place, const Message& message, int tile, float value) {
    const Work work(p_, place);
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
  // The thread's pairs, for formulas.
  FLASHJIT_FN auto pairs(u32 place, const Problem& problem, int first_row) const {
    const int first = Work(p_, place).keys.begin + first_key();
    return typename ScoreGradient::Place(p_, problem, first_row + lane_ % 4 * 2, first + lane_ / 4);
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
      if constexpr (packs_late) pack(scores, i);
    }
  }
  FLASHJIT_FN void pack(const Scores& scores, int i) {
    const auto weight = [&](int j) {
      const float computed = scores[4 * i + j];
      // Where formulas have derivatives, the exponents of blocks that make dV alone have no scale either.
      const float scale = Spec::dropout && ScoreGradient::changes ? p_.kept_scale() : 1;
      if constexpr (Spec::dropout && differentiates)
        return is_dropped(4 * i + j) ? 0.f : computed * scale;
      else
        return kept(computed) * scale;
    };
    packed_[i / 2][i % 2 * 2] = cvt_rn_x2(Element{}, weight(0), weight(1));
    packed_[i / 2][i % 2 * 2 + 1] = cvt_rn_x2(Element{}, weight(2), weight(3));
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

  static constexpr u32 unknown_keys = 4;
  const CudaBackwardParams& p_;
  const Shared& shared_;
  const int warpgroup_, warp_, lane_;
  Operand packed_, ds_;
  u32 column_words_[2];                   // with dropout
  u32 dropped_[ceil_div(tile_rows, 64)];  // with dropout if `differentiates`
  u32 bad_keys_ = 0;                      // if `clears_keys`: a bit for each of the thread's two keys
  // The gradients of learned tables, as far as this thread has added them up.
  [[no_unique_address]]
  typename TermsOf<ScoreGradient, Spec::deterministic, Kernel::makes_dk && ScoreGradient::changes>::type
      terms_;
};

}  // namespace flashjit::device
