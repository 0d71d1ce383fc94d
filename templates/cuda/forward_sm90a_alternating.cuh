// Two consumers of sm_90a's forward that take turns at blocks of keys. As FlashMLA has it for 512 columns
// (DeepSeek, 2025), each has half of the output's columns, and makes the weights of every other block for
// both: the softmax of one runs beside the products of the other. Each adds all blocks in their order.
#pragma once

#include "cuda/forward_sm90a_consumer.cuh"
#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/ptx_sm90a.cuh"

namespace flashjit::device {

// The buffer by which a consumer gives a block's weights to the other one, as an operand of wgmma, with the
// states of its rows. Both hold the same rows in the same lanes. A consumer gives next once its product with
// what it was given in between is complete, so nothing needs to say that the buffer is empty.
template <int steps>
class AlternatingWeights {
  static_assert(steps == 4, "rows of one panel");
  static constexpr int first_barrier = 8;  // id of a named barrier; another one for the second giver

 public:
  FLASHJIT_FN explicit AlternatingWeights(u32 buffer) : buffer_(buffer) {}

  FLASHJIT_FN u64 descriptor() const { return wgmma_descriptor(buffer_, 0); }

  template <class Softmax>
  FLASHJIT_FN void give(int giver, const u32 (&weights)[steps][4], const Softmax& softmax) const {
    const int thread = this->thread(), lane = thread % 32;
    const u32 row = buffer_ + (thread / 32 * 16 + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < steps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        st_shared(row + i % 2 * 1024 + ((2 * step + i / 2) ^ lane / 4) * 16, weights[step][i]);
    u32 state[4];
    softmax.give(state);
    st_shared_v4(buffer_ + steps * 2048 + thread * 16, state[0], state[1], state[2], state[3]);
    fence_proxy_async();
    bar_arrive(first_barrier + giver, 256);
  }
  // Returns whether outputs must be multiplied by softmax.correction().
  template <class Softmax>
  FLASHJIT_FN bool take(int giver, Softmax& softmax) const {
    bar_sync(first_barrier + giver, 256);
    u32 state[4];
    ld_shared_v4(state, buffer_ + steps * 2048 + thread() * 16);
    return softmax.take(state);
  }

 private:
  // Computed anew each time, as registers are short.
  FLASHJIT_FN static int thread() { return not_ahead(threadIdx.x) % 128; }

  u32 buffer_;
};

template <class Kernel, ColumnGroup group>
class Sm90aAlternatingConsumer : Sm90aConsumer<Kernel, group> {
  using Base = Sm90aConsumer<Kernel, group>;
  using Base::block_n;
  using Base::lane_;
  using Base::layout;
  using Base::p_;
  using Base::ring_;
  using Base::shared_;
  using Base::softmax_;
  using Base::under_way_;
  using typename Base::Blocks;
  using typename Base::Mask;
  using typename Base::Positions;
  using typename Base::Products;
  using typename Base::Rows;
  using typename Base::Score;
  using typename Base::Spec;
  using typename Base::Work;
  static constexpr int column_group = group == ColumnGroup::second ? 1 : 0;
  static constexpr int own_stage = column_group;  // its blocks' weights are this consumer's
  static constexpr int others_stage = 1 - column_group;
  static_assert(!Kernel::passes_blocks && !Spec::dropout && layout.second_piece > 0);

 public:
  FLASHJIT_FN Sm90aAlternatingConsumer(const Sm90aForwardParams& p, const typename Base::Shared& shared)
      : Base(p, shared), weights_(shared.start + layout.handed) {}

  FLASHJIT_FN void run() {
    for (u32 parity = 0;; parity ^= 1) {
      const Announcement announced = this->announcement(parity);
      if (announced.what() == Announced::end) break;
      softmax_.reset();
      if (announced.what() == Announced::tile) attend(announced);
      // Registers are short while blocks are computed, so what belongs to the tile is found again.
      const Announcement again = this->announcement(parity);
      this->release(shared_.q_empty());
      const Work work(p_, again.tile);
      const int thread = not_ahead(threadIdx.x);
      this->warp_ = __shfl_sync(0xffffffff, thread / 32 % 4, 0);
      lane_ = thread % 32;
      float factor[2], lse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = this->normalizer(r, work.problem.head_q, lse[r]);
      this->write(work, again, factor, lse);
    }
  }

 private:
  // Computes a tile or a part of one.
  FLASHJIT_FN void attend(const Announcement& announced) {
    const Work work(p_, announced.tile);
    const Mask mask(p_, work.problem);
    Blocks blocks(p_, shared_, mask, work, announced);
    Block block;
    blocks.next(block);
    const Positions rows = Rows(p_).positions(work.rows.begin, this->first_row() + lane_ / 4);
    const Score score(p_, work.problem);
    const auto heads = [&](int i) { return this->head_of(work.problem.head_q, lane_ / 4 + i); };
    const auto tilts = this->tilts_of(score, rows, heads);
    this->near_ = true;
    under_way_ = 0;
    // The sequence's end, if the first block extends past it.
    int end = block_span(block.index, block_n).end > work.problem.seqlen_k ? work.problem.seqlen_k : 0;
    const auto weigh = [&] {
      const auto of_rows = this->of_rows(score, rows, heads);
      return this->weigh_after_maxima(blocks, score, tilts, of_rows, rows, heads, block);
    };
    // Makes outputs and values ready for a product.
    const auto prepare = [&](int stage, bool rescale) {
      if (rescale && under_way_) this->rescale_output();
      wait_piece(stage, column_group);
      if (Base::ends_in_memory && end > 0) this->template zero_past_the_end<group>(stage, end);
      end = 0;
    };
    const auto multiply_own = [&](bool rescale) {
      this->pack_weights();
      weights_.give(column_group, this->Base::weights_, softmax_);
      prepare(own_stage, rescale);
      this->template issue_pv<group>({own_stage, ring_.parity});
      under_way_ = 1;
    };
    const auto multiply_given = [&] {
      prepare(others_stage, weights_.take(1 - column_group, softmax_));
      issue_given();
      under_way_ = 1;
    };
    const auto next = [&] {
      ring_.advance();
      return blocks.next(block);
    };
    const auto own = [&] {
      finish(others_stage);
      issue_qk();
      wgmma_wait_group<0>();
      multiply_own(weigh());
      return next();
    };
    if constexpr (column_group == 0) {
      const auto others = [&] {
        finish(own_stage);
        multiply_given();
        return next();
      };
      if (ring_.stage == own_stage || others())
        while (own() && others()) {
        }
    } else {
      // The second consumer computes its scores before it waits for weights: its softmax runs beside the
      // product with these. Measured: where the first one does so, too, both wait for copies.
      bool more = ring_.stage == others_stage || own();
      while (more) {
        finish(own_stage);
        if (!next()) {
          multiply_given();
          break;
        }
        issue_qk();
        wgmma_wait_group<0>();
        multiply_given();
        const bool rescale = weigh();
        finish(others_stage);
        multiply_own(rescale);
        more = next();
      }
    }
    finish(ring_.stage ^ 1);
  }

  // The two stages have the same parity between the first one's block and the second one's.
  FLASHJIT_FN void wait_piece(int stage, int piece) const {
    mbarrier_wait(piece > 0 ? shared_.v_full(stage) : shared_.k_full(stage), ring_.parity);
  }
  // Waits for the last product, if there is one. The consumer's piece of its stage is then free.
  FLASHJIT_FN void finish(int stage) const {
    wgmma_wait_group<0>();
    this->release(column_group > 0 ? shared_.v_empty(stage) : shared_.k_empty(stage), under_way_);
  }
  // As issue_pv() with the other consumer's weights.
  FLASHJIT_FN void issue_given() {
    const u64 v = wgmma_descriptor(
        shared_.v(others_stage) + Base::template first_panel<group> * layout.kv_panel, layout.kv_panel);
    wgmma_fence();
    if constexpr (column_group == 0)
      Products::pv_given(this->output_, weights_.descriptor(), v, under_way_);
    else
      Products::pv_rest_given(this->output_, weights_.descriptor(), v, under_way_);
    wgmma_commit_group();
  }
  // scores = Q K^T, in the order in which pieces arrive.
  FLASHJIT_FN void issue_qk() {
    const u64 q = wgmma_descriptor(shared_.q(), 0), k = wgmma_descriptor(shared_.k(own_stage), 0);
    wait_piece(own_stage, column_group);
    wgmma_fence();
    if constexpr (column_group == 0)
      Products::qk(this->scores_, q, k, 0);
    else
      Products::qk_rest(this->scores_, q, k, 0);
    wait_piece(own_stage, 1 - column_group);
    wgmma_fence();
    if constexpr (column_group == 0)
      Products::qk_rest(this->scores_, q, k, 1);
    else
      Products::qk(this->scores_, q, k, 1);
    wgmma_commit_group();
  }

  AlternatingWeights<layout.pv_steps> weights_;
};

}  // namespace flashjit::device
