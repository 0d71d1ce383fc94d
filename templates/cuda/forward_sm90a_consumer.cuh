// A consumer of sm_90a's forward: a block's scores, their softmax, and the product of weights and V.
#pragma once

#include "cuda/accumulator_row.cuh"
#include "cuda/dropout.cuh"
#include "cuda/forward_sm90a_columns.cuh"
#include "cuda/forward_sm90a_parts.cuh"
#include "cuda/forward_sm90a_shared.cuh"
#include "cuda/online_softmax.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/scaled.cuh"
#include "cuda/tile_rows.cuh"
#include "shared/forward_sm90a_params.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

template <class Kernel>
class Sm90aScoreScales;  // cuda/forward_sm90a_quantised.cuh

// Hides a value's origin, so that the compiler hoists nothing that depends on it: registers are short.
FLASHJIT_FN int not_ahead(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// A warpgroup: it computes 64 rows of every tile, or a column group of them.
template <class Kernel, ColumnGroup group>
class Sm90aConsumer {
 protected:
  using Spec = typename Kernel::Spec;
  using Config = typename Kernel::Config;
  using Element = typename Kernel::Element;
  using Mask = typename Kernel::Mask;
  using Score = typename Kernel::Score;
  using Sinks = typename Kernel::Sinks;
  using Rows = typename Kernel::Rows;
  using Positions = typename Rows::Positions;
  using Products = typename Config::Products;
  using Softmax = typename Kernel::Softmax;
  using Work = typename Kernel::Work;
  using Shared = typename Kernel::Shared;
  using Ring = typename Kernel::Ring;
  static constexpr Sm90aLayout layout = Kernel::layout;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr bool q_in_registers = Config::q_in_registers, ping_pong = Config::ping_pong;
  static constexpr int consumers = Kernel::consumers, column_groups = Kernel::column_groups;
  static constexpr bool has_kv_scales = Shared::has_kv_scales;
  static constexpr bool fixed_parts = Kernel::fixed_parts;
  static constexpr int walked_rows = Config::pack_gqa ? unknown_size : block_m;

  // With batch_invariant a row's own numbers decide its arithmetic: no short cut that a warp's rows share.
  static constexpr bool caps_near_zero = Score::bounds && !Spec::batch_invariant;
  static constexpr bool tilts_scores = Score::tilts && !Spec::batch_invariant;
  // Whether a block is weighed before its maxima are known. Measured: three consumers of narrow heads, which
  // wait for exponentials most, are 3% faster for it if they read Q from shared memory; others are not.
  static constexpr bool skips_maxima = consumers == 3 && Kernel::qk_panels == 1 && Kernel::v_panels == 1 &&
                                       !q_in_registers && !Score::changes && !has_kv_scales &&
                                       !Spec::batch_invariant;

  // Whether a warpgroup leaves out a tile's first block if only rows of the warpgroups after it see that.
  // Measured: two without turns are up to 5% slower for it.
  static constexpr bool leaves_block = ping_pong && Mask::row_intervals && makes_work_differ<Mask> &&
                                       !Config::pack_gqa && !Spec::v_in_k && !fixed_parts &&
                                       block_n <= Sm90aLayout::warpgroup_rows * (consumers - 1);

  // Whether normalizers are computed while a tile's last product runs. Measured: consumers of wider heads
  // then get out of step, which costs up to 3.5% of the time of long sequences.
  static constexpr bool normalizes_early = Spec::head_dim_v <= 128 || column_groups > 1;

  // Whether memory may have anything past a sequence's end: else copies fill with zeros.
  static constexpr bool ends_in_memory = Spec::varlen || Mask::padding || (Spec::paged && !Kernel::converts);

  // Ids of named barriers; 0 belongs to __syncthreads. With two column groups HandedWeights has the ids from
  // 8 on.
  static constexpr int turn_barrier = 1;       // + consumer: its turn at the tensor cores
  static constexpr int warpgroup_barrier = 4;  // + consumer: its own four warps

  // Whether a product with V goes before the next scores. Of two stages of values in keys one is then filled
  // again during scores and softmax, in pieces.
  static constexpr bool values_first = layout.second_piece > 0;
  // Whether V has mbarriers of its own: else it is a part of K, which arrives and is released as one.
  template <ColumnGroup of>
  static constexpr bool v_is_apart = !Spec::v_in_k || (values_first && of == ColumnGroup::second);

  struct Nothing {};
  static constexpr int first_columns = Sm90aLayout::first_columns(Spec::head_dim_v);
  template <ColumnGroup of>
  static constexpr int first_panel = of == ColumnGroup::second ? first_columns / Sm90aLayout::panel : 0;
  static constexpr int columns =
      group == ColumnGroup::second ? Spec::head_dim_v - first_columns : first_columns;
  // With 8-bit keys whose scales are arguments.
  using ScoreScales = typename Choose<has_kv_scales, Sm90aScoreScales<Kernel>, Nothing>::type;
  // Marks that no V stage is pending and that the first block extends past the sequence's end.
  static constexpr int ends_within = -1;

  // The blocks of a tile. next() returns whether there is another. A passed block comes with its K, for
  // which the consumer waits: take() reads it once the tensor cores have their work.
  struct Walked {
    const Mask& mask_;
    BlockWalk<Keys, Mask> walk_;
    FLASHJIT_FN Walked(const Sm90aForwardParams& p, const Shared& shared, const Mask& mask, const Work& work,
                       const Announcement& a)
        : mask_(mask), walk_(Kernel::walk(p, shared, mask, work, a.part())) {}
    FLASHJIT_FN bool next(Block& block) { return walk_.next(block); }
    FLASHJIT_FN void take(Block&, const Sm90aConsumer&) const {}
    template <class Heads>
    FLASHJIT_FN void mask(float (&scores)[block_n / 2], const Positions& rows, const Heads& heads,
                          const Block& block, int lane) const {
      mask_elements<walked_rows, block_n>(scores, mask_, rows, heads, block, lane);
    }
  };
  struct Passed {
    const Sm90aForwardParams& p_;
    const TileIndex tile_;
    bool last_ = false;
    FLASHJIT_FN Passed(const Sm90aForwardParams& p, const Shared&, const Mask&, const Work&,
                       const Announcement& a)
        : p_(p), tile_(a.tile) {}
    FLASHJIT_FN bool next(Block&) const { return !last_; }
    FLASHJIT_FN void take(Block& block, const Sm90aConsumer& consumer) {
      const PassedBlock passed = consumer.shared_.passed_block(consumer.ring_.stage);
      block = {passed.index(), passed.whole(), passed.found};
      last_ = passed.last();
      __syncwarp();  // all lanes have read it before lane 0 releases the stage
    }
    // The mask is made here, where it is needed: few blocks are not whole.
    template <class Heads>
    FLASHJIT_FN void mask(float (&scores)[block_n / 2], const Positions& rows, const Heads& heads,
                          const Block& block, int lane) const {
      mask_elements<walked_rows, block_n>(scores, Mask(p_, Work(p_, tile_).problem), rows, heads, block,
                                          lane);
    }
  };
  using Blocks = typename Choose<Kernel::passes_blocks, Passed, Walked>::type;

 public:
  FLASHJIT_FN Sm90aConsumer(const Sm90aForwardParams& p, const Shared& shared)
      : p_(p),
        shared_(shared),
        warpgroup_(__shfl_sync(0xffffffff, threadIdx.x / 128, 0) - 1),
        warp_(__shfl_sync(0xffffffff, threadIdx.x / 32 % 4, 0)),
        lane_(threadIdx.x % 32),
        softmax_(Score::scale_log2(p)),
        handed_(shared.start + layout.handed, warp_) {}

  FLASHJIT_FN void run() {
    if (ping_pong && warpgroup_ == consumers - 1) pass_turn();  // the first consumer begins
    if (follows()) handed_.begin();
    for (u32 parity = 0;; parity ^= 1) {
      const Announcement announced = announcement(parity);
      if (announced.what() == Announced::end) break;
      Work work(p_, announced.tile);
      work.problem.seqlen_k = not_ahead(work.problem.seqlen_k);
      float factor[2], lse[2];
      if (follows()) {
        if constexpr (group != ColumnGroup::first) follow(work, factor);
      } else {
        if constexpr (group != ColumnGroup::second) lead(work, announced, factor, lse);
      }
      write(work, announced, factor, lse);
    }
    if (ping_pong && warpgroup_ == 0) take_turn();  // the last turn that was passed
    if (column_groups > 1 && !follows()) handed_.end();
  }

 protected:
  // Whether it is the second of two column groups.
  FLASHJIT_FN bool follows() const {
    return group == ColumnGroup::either ? warpgroup_ > 0 : group == ColumnGroup::second;
  }
  FLASHJIT_FN int first_column() const { return follows() ? first_columns : 0; }

  // Computes a tile or a part of one.
  FLASHJIT_FN void lead(const Work& work, const Announcement& announced, float (&factor)[2],
                        float (&lse)[2]) {
    const bool any_keys = announced.what() == Announced::tile;
    if (any_keys) {
      attend(work, announced);
    } else {
      release(shared_.q_empty());
      softmax_.reset();
      if constexpr (fixed_parts) aside_.clear();
    }
    if constexpr (fixed_parts) {
      if (aside_.any()) {
        aside_.add_state(softmax_);
        aside_.give_state(softmax_, lane_);
      }
    }
    if constexpr (normalizes_early)
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = normalizer(r, work.problem.head_q, lse[r]);
    if constexpr (column_groups > 1) handed_.end_tile(factor);
    wgmma_wait_group<0>();
    if (any_keys) {
      release_v<ColumnGroup::first>(ring_.stage);
      ring_.advance();
    }
    if constexpr (fixed_parts)
      if (aside_.any()) aside_.add_to_outputs(output_);
  }
  // The same but for the end of its last product.
  FLASHJIT_FN void attend(const Work& work, const Announcement& announced) {
    if constexpr (has_kv_scales) take_scales(work.problem.head_kv);
    const Mask mask(p_, work.problem);
    Blocks blocks(p_, shared_, mask, work, announced);
    Block block;
    blocks.next(block);
    const Positions rows = Rows(p_).positions(work.rows.begin, first_row() + lane_ / 4);
    const Score score(p_, work.problem);
    const auto heads = [&](int i) { return head_of(work.problem.head_q, lane_ / 4 + i); };
    const auto tilts = tilts_of(score, rows, heads);
    if constexpr (q_in_registers) take_q();
    [[maybe_unused]] const Ring first = ring_;
    [[maybe_unused]] int left = 0;
    if constexpr (leaves_block) {
      left = leave_block(blocks, mask, work, block);
      wait_k();
      release(shared_.k_empty(first.stage), left);
      ring_.advance_if(left);
    }
    wait_k();
    issue_qk();
    if constexpr (!values_first)
      wgmma_commit_group();  // empty: stands for the product with V that weigh() waits for
    if constexpr (leaves_block) {
      mbarrier_wait(left ? shared_.v_full(first.stage) : shared_.k_full(first.stage), first.parity);
      release(shared_.v_empty(first.stage), left);
      pass_turn_if(left);
    }
    blocks.take(block, *this);
    if constexpr (Spec::dropout) make_row_words(work);
    softmax_.reset();
    near_ = true;
    takes_maxima_ = true;
    under_way_ = 0;
    if constexpr (fixed_parts) {
      aside_.clear();
      part_begin_ = begin_of_part(block.index);
    }
    int v_stage =  // of the product with V that is under way
        block_span(block.index, block_n).end > work.problem.seqlen_k ? ends_within : 0;
    for (;;) {
      weigh(blocks, score, tilts, rows, heads, block, v_stage);
      if (!blocks.next(block)) break;
      const Ring before = ring_;
      ring_.advance();
      const auto issue_values = [&] {
        wait_v<ColumnGroup::first>(before, v_stage, work);
        issue_pv<ColumnGroup::first>(before);
      };
      if constexpr (values_first) issue_values();
      wait_k();
      if constexpr (ping_pong) take_turn();
      issue_qk();
      if constexpr (!values_first) issue_values();
      v_stage = before.stage;
      under_way_ = 1;
      if constexpr (ping_pong) pass_turn();
      blocks.take(block, *this);
      if constexpr (fixed_parts)
        if (block.index < part_begin_) end_part(block, v_stage);
    }
    if constexpr (!q_in_registers) release(shared_.q_empty());
    wait_v<ColumnGroup::first>(ring_, v_stage, work);
    issue_pv<ColumnGroup::first>(ring_);
    if constexpr (values_first) handed_.tell();
  }

  // Computes the columns of the second group: multiplies the weights that the first one hands on with V.
  FLASHJIT_FN void follow(const Work& work, float (&factor)[2]) {
    release(shared_.q_empty());
    under_way_ = 0;
    for (;;) {
      wgmma_wait_group<0>();
      if (under_way_) {
        release_v<ColumnGroup::second>(ring_.stage);
        ring_.advance();
      }
      const Handed handed = handed_.take(weights_, factor);
      if (handed.ends_tile()) return;
      if (handed.rescales() && under_way_) {
#pragma unroll
        for (int i = 0; i < columns / 2; ++i) output_[i] *= factor[i / 2 % 2];
      }
      wait_v<ColumnGroup::second>(ring_, handed.ends_within() ? ends_within : 0, work);
      issue_pv<ColumnGroup::second>(ring_);
      under_way_ = 1;
    }
  }

  // Goes on to the second block if this warpgroup's rows see nothing of the first one, and there is another.
  FLASHJIT_FN int leave_block(Blocks& blocks, const Mask& mask, const Work& work, Block& block) const {
    const int row = work.rows.begin + warpgroup_ * Sm90aLayout::warpgroup_rows;
    const Span seen = mask.hull(Keys{}, {row, row + Sm90aLayout::warpgroup_rows});
    const int leaves = seen.end <= block.index * block_n && blocks.next(block);
    return __shfl_sync(0xffffffff, leaves, 0);  // by shuffle, so that uniform registers hold it
  }

  // Writes the warp's rows of a tile or of a part of one.
  FLASHJIT_FN void write(const Work& work, const Announcement& announced, float (&factor)[2],
                         float (&lse)[2]) const {
    if (Kernel::by_length ? announced.part() != 0 : p_.parts > 1)
      write_part<Spec::head_dim_v, !Kernel::by_length>(
          p_, announced.place() * block_m + first_row() + lane_ / 4,
          (work.rows_end - work.rows.begin) * Rows(p_).heads - (first_row() + lane_ / 4), lane_,
          first_column(), output_, softmax_);
    else
      write_output(output_rows(Work(p_, work.problem, not_ahead(work.m_block))), work.problem.head_q,
                   work.problem.head_kv, factor, lse);
  }

  // The destination of a warp's rows. Pointers are to the warp's first row; with pack_gqa, to the tile's.
  struct OutputRows {
    char* o;
    float* lse;
    int rows;   // their number from the warp's first row to the tile's end; may be negative
    int valid;  // the same without padding
  };

  FLASHJIT_FN int first_row() const {
    return (column_groups > 1 ? 0 : warpgroup_ * Sm90aLayout::warpgroup_rows) + warp_ * 16;
  }
  FLASHJIT_FN OutputRows output_rows(const Work& work) const {
    const int first = work.rows.begin + (Config::pack_gqa ? 0 : first_row());
    OutputRows t{static_cast<char*>(p_.o.data) +
                     Kernel::o_bytes * (work.problem.q_offset(p_.o) + first * p_.o.row_stride),
                 nullptr, work.rows_end - first, work.rows.end - first};
    if constexpr (Spec::lse) t.lse = static_cast<float*>(p_.lse.data) + work.problem.q_offset(p_.lse) + first;
    if constexpr (Config::pack_gqa) {
      t.rows = t.rows * Rows(p_).heads - first_row();
      t.valid = t.valid * Rows(p_).heads - first_row();
    }
    return t;
  }
  // Elements from OutputRows::o to row i of the warp's 16; likewise for lse.
  FLASHJIT_FN i64 o_offset(int i) const {
    if constexpr (Config::pack_gqa) return Rows(p_).offset(p_.o, first_row() + i);
    return i * p_.o.row_stride;
  }
  FLASHJIT_FN i64 lse_offset(int i) const {
    if constexpr (Config::pack_gqa) return Rows(p_).offset(p_.lse, first_row() + i);
    return i;
  }

  // The query head of the warp's row i, if `first` is that of the tile's first row.
  FLASHJIT_FN int head_of(int first, int i) const { return first + Rows(p_).head(first_row() + i); }
  FLASHJIT_FN float normalizer(int r, [[maybe_unused]] int first_head, float& lse) const {
    if constexpr (Sinks::exist)
      return softmax_.normalizer(r, lse, Sinks::log2(p_, head_of(first_head, lane_ / 4 + 8 * r)));
    return softmax_.normalizer(r, lse);
  }

  FLASHJIT_FN void take_turn() const { bar_sync(turn_barrier + warpgroup_, 256); }
  FLASHJIT_FN void pass_turn() const { bar_arrive(next_turn(), 256); }
  // Both. By predicates, as a branch would take descriptors out of uniform registers.
  FLASHJIT_FN void pass_turn_if(int condition) const {
    bar_sync_arrive_if(condition, turn_barrier + warpgroup_, next_turn(), 256);
  }
  FLASHJIT_FN int next_turn() const {
    return turn_barrier + (warpgroup_ == consumers - 1 ? 0 : warpgroup_ + 1);
  }
  FLASHJIT_FN void release(u32 empty, bool held = true) const {
    mbarrier_arrive_if(lane_ == 0 && held, empty);
  }
  // A block's buffers are free: K after its scores, V, which may be part of it, after the product with it.
  FLASHJIT_FN void release_k(int stage) const {
    if constexpr (!Spec::v_in_k) release(shared_.k_empty(stage));
  }
  template <ColumnGroup of>
  FLASHJIT_FN void release_v(int stage, bool held = true) const {
    release(v_is_apart<of> ? shared_.v_empty(stage) : shared_.k_empty(stage), held);
  }

  FLASHJIT_FN Announcement announcement(u32 parity) const {
    mbarrier_wait(shared_.q_full(), parity);
    const auto announced = *reinterpret_cast<const Announcement*>(shared_.memory + layout.announced);
    __syncwarp();  // all lanes have read it before lane 0 releases it
    return announced;
  }
  // With such scales. Also makes Q ready for the products.
  FLASHJIT_FN void take_scales(int head_kv) {
    score_scales_.take(p_, head_kv, shared_.q() + first_row() * 128, lane_);
    fence_proxy_async();
    if constexpr (q_in_registers)
      __syncwarp();
    else
      bar_sync(warpgroup_barrier + warpgroup_, 128);
  }
  FLASHJIT_FN void take_q() {
#pragma unroll
    for (int step = 0; step < layout.qk_steps; ++step) {
      const int r = lane_ % 16, chunk = step % 4 * 2 + lane_ / 16;
      ldmatrix_x4(q_[step],
                  shared_.q() + step / 4 * layout.q_panel + (first_row() + r) * 128 + (chunk ^ r % 8) * 16);
    }
    __syncwarp();
    release(shared_.q_empty());
  }
  FLASHJIT_FN void wait_k() const { mbarrier_wait(shared_.k_full(ring_.stage), ring_.parity); }
  FLASHJIT_FN void wait_second_piece() const { mbarrier_wait(shared_.v_full(ring_.stage), ring_.parity); }
  template <ColumnGroup of>
  FLASHJIT_FN void wait_v(const Ring& ring, int v_stage, const Work& work) const {
    if constexpr (v_is_apart<of>)
      mbarrier_wait(shared_.v_full(ring.stage), ring.parity);
    else if constexpr (of == ColumnGroup::second)  // the first one has waited for K
      mbarrier_wait(shared_.k_full(ring.stage), ring.parity);
    if (ends_in_memory && v_stage == ends_within) zero_past_the_end<of>(ring.stage, work.problem.seqlen_k);
  }

  // Rows of V past a sequence's end may hold NaN, which a weight of 0 does not cancel.
  template <ColumnGroup of>
  FLASHJIT_FN void zero_past_the_end(int stage, int seqlen_k) const {
    constexpr int panels = ceil_div(columns, Sm90aLayout::panel);
    seqlen_k = not_ahead(seqlen_k);
    for (int i = seqlen_k % block_n * 8 + threadIdx.x % 128; i < block_n * 8; i += 128)
      for (int panel = first_panel<of>; panel < first_panel<of> + panels; ++panel)
        st_shared_v4(shared_.v(stage) + panel * layout.kv_panel + i * 16, 0, 0, 0, 0);
    fence_proxy_async();
    bar_sync(warpgroup_barrier + warpgroup_, 128);
  }

  // scores = Q K^T
  FLASHJIT_FN void issue_qk() {
    const u64 k = wgmma_descriptor(shared_.k(ring_.stage), 0);
    if constexpr (values_first && q_in_registers) wait_second_piece();
    wgmma_fence();
    if constexpr (q_in_registers)
      Products::qk(scores_, q_, k);
    else
      Products::qk(scores_, wgmma_descriptor(shared_.q() + warpgroup_ * Sm90aLayout::warpgroup_rows * 128, 0),
                   k);
    if constexpr (values_first && !q_in_registers) {
      wait_second_piece();
      wgmma_fence();  // ptxas would put one here, and warn
      Products::qk_rest(scores_, wgmma_descriptor(shared_.q(), 0), k);
    }
    wgmma_commit_group();
  }

  // output += weights V; without a product under way, output = weights V
  template <ColumnGroup of>
  FLASHJIT_FN void issue_pv(const Ring& ring) {
    const u64 v =
        wgmma_descriptor(shared_.v(ring.stage) + first_panel<of> * layout.kv_panel, layout.kv_panel);
    wgmma_fence();
    if constexpr (of == ColumnGroup::first)
      Products::pv(output_, weights_, v, under_way_);
    else
      Products::pv_rest(output_, weights_, v, under_way_);
    wgmma_commit_group();
  }

  // Each lane makes the words of one of the warp's rows, then gets the words of its own two rows.
  FLASHJIT_FN void make_row_words(const Work& work) {
    const Rows rows(p_);
    const int row = first_row() + lane_ % 16;
    const RowWords words = row_words_at<typename Spec::Offsets>(
        p_, shared_.dropout_key(), rows.positions(work.rows.begin, row)(0),
        work.problem.head_q + rows.head(row), work.problem.batch);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_words_[r] = row_words_of(words, lane_ / 4 + 8 * r);
  }
  // Drops weights that are summed already.
  FLASHJIT_FN void drop_weights() {
    const u32 from = shared_.column_words(ring_);
#pragma unroll
    for (int step = 0; step < block_n / 16; ++step) {
      u32 words[4];
      ld_column_words(words, from, step, lane_);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (dropped(row_words_[i / 2 % 2], words[i / 4 * 2 + i % 2], p_.dropout.below))
          scores_[8 * step + i] = 0;
    }
  }

  // A thread holds the same columns of an accumulator and of operand A.
  FLASHJIT_FN void pack_weights() {
#pragma unroll
    for (int i = 0; i < block_n / 4; ++i)
      weights_[i / 4][i % 4] = cvt_rn_x2(typename Shared::PvElement{}, scores_[2 * i], scores_[2 * i + 1]);
  }

  // Turns scores into weights beside the product of the previous weights and V. One body serves all blocks,
  // first and later, masked and whole: each further body would cost a tenth of the compile time.
  template <class Tilts, class Heads>
  FLASHJIT_FN void weigh(const Blocks& blocks, const Score& score, const Tilts& tilts, const Positions& rows,
                         const Heads& heads, const Block& block, int v_stage) {
    const auto of_rows = this->of_rows(score, rows, heads);
    wgmma_wait_group<1>();
    if constexpr (values_first) {
      release_v<ColumnGroup::first>(v_stage, under_way_);
      wgmma_wait_group<0>();
      // The second group multiplies the block before during this one's softmax.
      if (under_way_) handed_.tell();
      release(shared_.v_empty(ring_.stage));
    }
    if constexpr (!skips_maxima) release_k(ring_.stage);
    if constexpr (has_kv_scales) score_scales_.apply(scores_, shared_, ring_, lane_);
    bool rescale = false;
    if constexpr (skips_maxima) {
      rescale = weigh_without_maxima(blocks, rows, heads, block);
      release_k(ring_.stage);
    } else {
      rescale = weigh_after_maxima(blocks, score, tilts, of_rows, rows, heads, block);
    }
    if constexpr (Spec::dropout) drop_weights();
    if constexpr (!values_first) {
      wgmma_wait_group<0>();
      release_v<ColumnGroup::first>(v_stage, under_way_);
    }
    pack_weights();
    if constexpr (column_groups > 1)
      handed_.template give<!values_first>(weights_, softmax_, rescale, v_stage == ends_within);
    if (rescale && under_way_) rescale_output();
  }
  template <class Tilts, class OfRows, class Heads>
  FLASHJIT_FN bool weigh_after_maxima(const Blocks& blocks, const Score& score, const Tilts& tilts,
                                      const OfRows& of_rows, const Positions& rows, const Heads& heads,
                                      const Block& block) {
    bool rescale = false;
    if (!weigh_near_zero(score, block, rescale)) {
      const auto exponents = change(score, tilts, of_rows, rows, heads, block.index * block_n);
      if (!block.whole) blocks.mask(scores_, rows, heads, block, lane_);
      rescale = softmax_.template take_max<block_n / 2>(scores_, exponents);
      softmax_.template exponentiate<block_n / 2>(scores_, exponents);
    }
    return rescale;
  }
  FLASHJIT_FN void rescale_output() {
#pragma unroll
    for (int i = 0; i < columns / 2; ++i) output_[i] *= softmax_.correction(i / 2 % 2);
  }
  // Weighs a block relative to the references of the blocks before. Where weights leave their range, the
  // warpgroup computes the scores again, since K is still there, and takes the maxima, as it then does of the
  // tile's other blocks.
  template <class Heads>
  FLASHJIT_FN bool weigh_without_maxima(const Blocks& blocks, const Positions& rows, const Heads& heads,
                                        const Block& block) {
    bool rescale = false;
    float sums[2];
#pragma unroll 1
    for (;;) {
      if (!block.whole) {
        Block masked = block;
        masked.index = not_ahead(block.index);  // whole blocks compute nothing for masks
        blocks.mask(scores_, rows, heads, masked, lane_);
      }
      if (takes_maxima_) rescale |= softmax_.template take_max<block_n / 2>(scores_);
      softmax_.template weigh<block_n / 2>(scores_, sums);
      if (!near_) break;
      const bool leaves = !takes_maxima_ && !softmax_.template in_range<typename Shared::PvElement>(sums);
      near_ = !bar_red_or(warpgroup_barrier + warpgroup_, 128, leaves);
      if (near_) break;
      takes_maxima_ = true;
      issue_qk();
      wgmma_wait_group<0>();
    }
    if (takes_maxima_ && near_) takes_maxima_ = softmax_.any_without_keys();
    softmax_.add(sums);
    return rescale;
  }
  // Puts the sums of a part aside, once its last product is complete. `block` is the next part's.
  FLASHJIT_FN void end_part(const Block& block, int v_stage) {
    wgmma_wait_group<0>();
    release_v<ColumnGroup::first>(v_stage);
    under_way_ = 0;
    aside_.add_state(softmax_);
    aside_.add_outputs(output_);
    softmax_.reset();
    part_begin_ = begin_of_part(block.index);
  }
  // The first block of the part that a block is in.
  FLASHJIT_FN static int begin_of_part(int block) {
    return block / Kernel::fixed_blocks * Kernel::fixed_blocks;
  }

  // Capped scores that are all near 0. After a block where they are not, a tile's others are not asked.
  FLASHJIT_FN bool weigh_near_zero(const Score& score, const Block& block, bool& rescale) {
    if constexpr (caps_near_zero) {
      if (near_ && block.whole) {
        near_ = score.template are_near_zero<typename Shared::PvElement, block_n / 2>(scores_);
        if (near_) {
          rescale = softmax_.take_near_zero();
          softmax_.template exponentiate<block_n / 2>(scores_, score.near_zero());
          return true;
        }
      }
    }
    return false;
  }
  // What a formula has of a tile's rows.
  template <class Heads>
  FLASHJIT_FN static auto tilts_of(const Score& score, const Positions& rows, const Heads& heads) {
    if constexpr (tilts_scores)
      return score.tilts_of(rows, heads);
    else
      return Nothing{};
  }
  // The same, asked for before the wait for a block's scores, as it may come from memory.
  template <class Heads>
  FLASHJIT_FN static auto of_rows(const Score& score, const Positions& rows, const Heads& heads) {
    if constexpr (tilts_scores)
      return Nothing{};
    else
      return score.of_rows(rows, heads);
  }
  // The formulas on scores, and how their results become exponents.
  template <class Tilts, class OfRows, class Heads>
  FLASHJIT_FN auto change(const Score& score, const Tilts& tilts, const OfRows& of_rows,
                          const Positions& rows, const Heads& heads, int first_key) {
    if constexpr (tilts_scores) {
      return score.template tilt<block_n>(scores_, tilts, rows, heads, first_key, lane_);
    } else {
      score.template modify<block_n>(scores_, of_rows, rows, heads, first_key, lane_);
      if constexpr (has_kv_scales && !Score::changes)
        return score_scales_.exponents();
      else
        return Unshifted{};
    }
  }

  // Four lanes hold a row. With 16-bit output each lane collects one of four chunks of 8 columns: it then
  // writes 16 bytes, and a warp's store writes 64 contiguous bytes of each row.
  FLASHJIT_FN void write_output(const OutputRows& to, int first_head, int head_kv, float (&factor)[2],
                                float (&lse)[2]) const {
    constexpr int chunks = columns / 8;
    const int part = lane_ % 4;
    const float scale = Kernel::output_factor(p_, head_kv);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_ / 4 + 8 * r;
      if constexpr (!normalizes_early) factor[r] = normalizer(r, first_head, lse[r]);
      factor[r] *= scale;
      if (Mask::padding && row >= to.valid) factor[r] = 0, lse[r] = minus_infinity;
      if (Spec::lse && !follows() && part == 0 && row < to.rows) to.lse[lse_offset(row)] = lse[r];
      // A row without keys may have met NaN in V, which no factor makes 0: such a row is written as zeros.
      if constexpr (Kernel::o_bytes == 4) {
        float* const o = reinterpret_cast<float*>(to.o) + o_offset(row) + first_column();
        if (row < to.rows) write_floats<Spec::batch_invariant>(o, output_, r, factor[r], part);
      } else {
        char* const o = to.o + Kernel::o_bytes * (o_offset(row) + first_column()) + part * 16;
#pragma unroll
        for (int g = 0; g < chunks; g += 4) {
          u32 x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 4 * min(g + i, chunks - 1) + 2 * r;
            x[i] = cvt_rn_x2(Element{}, scaled<Spec::batch_invariant>(output_[at], factor[r]),
                             scaled<Spec::batch_invariant>(output_[at + 1], factor[r]));
          }
          transpose_quad(x, part);
          if (row < to.rows && g + part < chunks)
            *reinterpret_cast<uint4*>(o + g * 16) = uint4{x[0], x[1], x[2], x[3]};
        }
        if (factor[r] == 0 && row < to.rows)
#pragma unroll 1
          for (int g = 0; g + part < chunks; g += 4)
            *reinterpret_cast<uint4*>(o + g * 16) = uint4{0, 0, 0, 0};
      }
    }
  }

  const Sm90aForwardParams& p_;
  const Shared& shared_;
  const int warpgroup_;  // by shuffle, as warp_ is, so that uniform registers hold them
  int warp_, lane_;
  Ring ring_;
  u32 q_[q_in_registers ? layout.qk_steps : 1][4];
  float scores_[block_n / 2];
  u32 weights_[layout.pv_steps][4];
  float output_[columns / 2];
  Softmax softmax_;
  bool near_;              // the tile's scores so far: to 0, with caps_near_zero, or to the references
  bool takes_maxima_;      // of the next block, with skips_maxima
  int under_way_;          // 1: a product with V is under way, to which the next one adds
  RowWords row_words_[2];  // with dropout
  ScoreScales score_scales_;
  HandedWeights<layout.pv_steps> handed_;  // with two column groups
  // With fixed_parts; blocks come from the last to the first.
  int part_begin_;
  typename Choose<fixed_parts, PartsAside<columns / 2>, Nothing>::type aside_;
};

}  // namespace flashjit::device
