// Backward attention with mma.sync, ldmatrix and cp.async: every GPU from sm_80 up. Weights are made again
// from lse (FlashAttention, Dao et al. 2022, algorithm 4; FlashAttention-2, Dao 2023).
//
// A block of threads has block_n keys of one key/value head, and passes block_m query rows by at a time, of
// all query heads that share it. Scores are transposed, S^T = K Q^T and dP^T = V dO^T: a warp owns 16 or 32
// keys, so P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q where they are, in registers, and dK
// and dV need no other warp. Only dQ = dS K sums over all keys. dS^T goes through shared memory for it, and
// the result is added to sums in global memory.
//
// Data and strides of all 16-bit tensors are multiples of 16 bytes.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/backward_sm80_columns.cuh"
#include "cuda/mma_products.cuh"
#include "cuda/ptx_reduce.cuh"
#include "cuda/row_walk.cuh"
#include "shared/dropout.h"
#include "shared/layout.h"

namespace flashjit::device {

template <class Spec, class Config>
class BackwardSm80 : SharedKeys<Spec, Config> {
  using Shared = SharedKeys<Spec, Config>;
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;

  static constexpr int num_warps = Config::num_warps, threads = num_warps * 32;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using Shared::parts, Shared::warp_keys, Shared::m_tiles, Shared::warp_rows, Shared::q_tiles,
      Shared::k_tiles, Shared::v_tiles;
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16), v_steps = ceil_div(Spec::head_dim_v, 16);
  static_assert(backward_row_unit % block_m == 0);

  using KTile = SharedTile<block_n, k_steps * 2>;
  using VTile = SharedTile<block_n, v_steps * 2>;
  using QTile = SharedTile<block_m, k_steps * 2>;
  using OTile = SharedTile<block_m, v_steps * 2>;
  using DsTile = typename Shared::DsTile;
  static constexpr CudaBackwardLayout layout{
      Spec::head_dim, Spec::head_dim_v,   block_m, block_n, Config::num_stages,
      Spec::dropout,  Spec::deterministic};

  // clears_keys: also in K, which dQ's product reads.
  static constexpr bool isolates = isolates_dropped<Mask>, clears_keys = isolates && !Spec::deterministic;

  // dQ is divided among the warps by rows and by columns.
  static constexpr int dq_row_warps = block_m == 16 ? 1 : block_m == 128 && num_warps == 8 ? 4 : 2;
  static constexpr int dq_column_warps = num_warps / dq_row_warps;
  static constexpr int dq_m_tiles = block_m / dq_row_warps / 16;
  static constexpr int dq_pairs = ceil_div(k_steps, dq_column_warps);  // 16 columns each
  // How many of them a warp computes at a time: beside sums of wide heads it has registers for few.
  static constexpr int dq_at_once = parts == 4 ? min(dq_pairs, 2) : dq_pairs;

 public:
  FLASHJIT_FN static void run(const CudaBackwardParams& p, u32 shared) {
    const KeyBlock<Mask> keys(ctaid_x(), static_cast<u32>(max(ceil_div(p.seqlen_k, block_n), 1)),
                              static_cast<u32>(p.batch * p.place_heads), p.section);
    const int first_key = static_cast<int>(keys.block) * block_n;
    const int batch = static_cast<int>(keys.head / p.num_heads_kv);
    const int head_kv = static_cast<int>(keys.head) - batch * p.num_heads_kv;
    // The keys of the slot, padding included.
    if (first_key >= make_problem<Spec::varlen>(p, batch, 0).seqlen_k) return;
    BackwardSm80(p, shared, batch, head_kv, first_key).run();
  }

 private:
  // block_m query rows of a head.
  struct Step {
    int head = -1;  // negative: none
    Block block;
    i64 place;  // of the first row in the workspace
  };

  FLASHJIT_FN BackwardSm80(const CudaBackwardParams& p, u32 shared, int batch, int head_kv, int first_key)
      : p_(p),
        shared_(shared),
        batch_(batch),
        head_kv_(head_kv),
        first_key_(first_key),
        lane_(tid_x() % 32),
        warp_(tid_x() / 32 / parts),
        part_(tid_x() / 32 % parts) {}

  FLASHJIT_FN u32 q_tile(int stage) const { return shared_ + layout.q + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 o_tile(int stage) const { return shared_ + layout.d_o + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 lse(int stage) const { return shared_ + layout.lse + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 delta(int stage) const { return shared_ + layout.delta + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 row_words(int stage) const {
    return shared_ + layout.row_words + stage * layout.stage_bytes;
  }
  FLASHJIT_FN u32 ds_tile(int turn) const { return shared_ + layout.ds + turn * DsTile::bytes; }
  FLASHJIT_FN Problem problem_of(int head) const {
    return make_problem<Spec::varlen, Mask::padding>(p_, batch_, head);
  }
  // The first of the step's rows whose scores this warp makes.
  FLASHJIT_FN u32 warp_row() const { return part_ * warp_rows; }
  FLASHJIT_FN int warp_key() const { return first_key_ + static_cast<int>(warp_) * warp_keys; }

  FLASHJIT_FN void run() {
    const int group = p_.num_heads_q / p_.num_heads_kv, first_head = head_kv_ * group;
    const Problem any = problem_of(first_head);
    const Span keys = {first_key_, min(first_key_ + block_n, any.seqlen_k)};
    clear(dk_);
    clear(dv_);
    copy<KTile, Spec::head_dim>(shared_ + layout.k, p_.k, any.k_offset(p_.k), first_key_, any.seqlen_k);
    copy<VTile, Spec::head_dim_v>(shared_ + layout.v, p_.v, any.k_offset(p_.v), first_key_, any.seqlen_k);
    if constexpr (Spec::dropout) make_column_words();
    griddepcontrol_wait();  // for lse_log2, delta and zeros of dQ's sums

    // The copies of a step are under way while the step before it is computed. dQ of a step is added during
    // the next one, so that one barrier a step is enough. After the last head comes a turn that only
    // computes.
    Step ready, before;
    int stage = 0;
    bool checked = false;
    for (int head = first_head; head <= first_head + group; ++head) {
      const bool has_rows = head < first_head + group;
      const Problem problem = problem_of(min(head, first_head + group - 1));
      const Mask mask(p_, problem);
      // Narrow heads have no registers for a walk of their own.
      RowWalk<Mask, block_m, RowOrder::apart, key_intervals<Mask> && parts != 1> walk(
          mask, has_rows ? keys : Span{0, 0});
      Step next;
      do {
        next.head = walk.next(next.block) ? head : -1;
        if (next.head < 0 && has_rows) break;
        // Keys of the tile beyond the sequence are none of `keys`.
        next.block.whole = next.block.whole && keys.size() == block_n;
        if (ready.head >= 0) {
          cp_async_wait_group<0>();
          __syncthreads();  // the step's rows are there; everybody has left the step before, and its dS
          if (clears_keys && !checked) clear_bad_keys();
          checked = true;
          if (Config::num_stages == 1) {
            compute(ready, 0, stage, before);
            __syncthreads();
          }
        }
        if (next.head >= 0) load(next, problem, Config::num_stages == 1 ? 0 : stage);
        cp_async_commit_group();
        if (Config::num_stages == 2 && ready.head >= 0) compute(ready, stage ^ 1, stage, before);
        before = ready;
        ready = next;
        stage ^= 1;
      } while (next.head >= 0);
    }
    if constexpr (ScoreGradient::changes) ScoreGradient::flush(p_, place(any, 0, 0), terms_);
    cp_async_wait_group<0>();
    __syncthreads();
    if (!Spec::deterministic && parts == 1 && before.head >= 0) {
      add_dq(before, stage ^ 1);
      __syncthreads();  // nobody reads K any more
    }
    finish(any);
  }

  template <class Tile, int head_dim>
  FLASHJIT_FN void copy(u32 to, const TensorView& t, i64 offset, int first, int end) const {
    TileCopy<Tile, head_dim, threads>(static_cast<const Element*>(t.data) + offset, t.row_stride, tid_x())(
        to, first, end);
  }

  FLASHJIT_FN i64 place_of(const Problem& problem, int first_row) const {
    return problem.head_q * p_.rows + p_.first_row(batch_, problem.first_q, Spec::varlen) + first_row;
  }

  FLASHJIT_FN void load(Step& step, const Problem& problem, int stage) const {
    const int first = step.block.index * block_m;
    step.place = place_of(problem, first);
    copy<QTile, Spec::head_dim>(q_tile(stage), p_.q, problem.q_offset(p_.q), first, problem.seqlen_q);
    copy<OTile, Spec::head_dim_v>(o_tile(stage), p_.d_o, problem.q_offset(p_.d_o), first, problem.seqlen_q);
    const u32 thread = tid_x(), part = thread % (block_m / 4);
    if (thread < block_m / 2) {
      const bool second = thread >= block_m / 4;
      cp_async_cg((second ? delta(stage) : lse(stage)) + part * 16,
                  (second ? p_.delta : p_.lse_log2) + step.place + part * 4, 16);
    }
    if constexpr (Spec::dropout) {
      for (u32 row = thread; row < block_m; row += threads) {
        const RowWords words =
            row_words_at<typename Spec::Offsets>(p_, key_, first + static_cast<int>(row), step.head, batch_);
        st_shared_v2(row_words(stage) + row * 8, words.multiplier, words.addend);
      }
    }
  }

  // The words of this thread's keys: rows lane / 4 and lane / 4 + 8 of each tile.
  FLASHJIT_FN void make_column_words() {
    key_ = dropout_key(p_.dropout);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key =
            warp_key() + i * 16 + half * 8 + static_cast<int>(lane_ / 4) + Spec::Offsets::of_keys(p_, batch_);
        const Words words = dropout_column_words(key_, key / 4, batch_);
        column_words_[i][half] = key % 4 == 0   ? words.x[0]
                                 : key % 4 == 1 ? words.x[1]
                                 : key % 4 == 2 ? words.x[2]
                                                : words.x[3];
      }
  }

  // Finds keys whose K is not finite, among those of this thread's scores, and makes it zeros.
  FLASHJIT_FN void clear_bad_keys() {
    const RowOfTile<Element, KTile> k{shared_ + layout.k, lane_ % 4, 4};
    const auto row_of = [&](int i) { return warp_ * warp_keys + static_cast<u32>(i) * 8 + lane_ / 4; };
    bad_keys_ = 0;
#pragma unroll
    for (int i = 0; i < 2 * m_tiles; ++i) {
      float sum = k.zero_or_nan(row_of(i));
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (sum != 0) bad_keys_ |= 1u << i;
    }
    __syncthreads();  // several warps may have the same keys
#pragma unroll
    for (int i = 0; i < 2 * m_tiles; ++i)
      if (bad_keys_ >> i & 1) k.clear(row_of(i));
    __syncthreads();
  }
  // Every warp makes zeros of the same rows, and so waits for no other.
  FLASHJIT_FN void clear_rows_without_weights(int stage) const {
    const RowOfTile<Element, QTile> q{q_tile(stage), 0, 1};
    const RowOfTile<Element, OTile> d_o{o_tile(stage), 0, 1};
#pragma unroll 1
    for (u32 row = lane_ * 2; row < block_m; row += 64) {
      int words[2];
      ld_shared_v2(words[0], words[1], lse(stage) + row * 4);
      for (u32 i = 0; i < 2; ++i)
        if (has_no_weights(__int_as_float(words[i]))) q.clear(row + i), d_o.clear(row + i);
    }
    __syncwarp();
  }

  // `turn` names the buffer of dS that is free; the other one has that of the step before.
  FLASHJIT_FN void compute(const Step& step, int stage, int turn, const Step& before) {
    if constexpr (isolates) clear_rows_without_weights(stage);
    const u32 q_rows = q_tile(stage) + warp_row() * QTile::row_bytes + QTile::lane_offset_b(lane_);
    const u32 o_rows = o_tile(stage) + warp_row() * OTile::row_bytes + OTile::lane_offset_b(lane_);
    const u32 k_rows = shared_ + layout.k + warp_ * warp_keys * KTile::row_bytes + KTile::lane_offset(lane_);
    const u32 v_rows = shared_ + layout.v + warp_ * warp_keys * VTile::row_bytes + VTile::lane_offset(lane_);
    float p[m_tiles][q_tiles][4], ds[m_tiles][q_tiles][4];
    const u32 marks = far_marks<warp_rows>(p_, step.place + warp_row());
    multiply_rows<Element, KTile, QTile, k_steps>(p, k_rows, q_rows);
    const bool any_far = marks != 0;
    if (!Spec::deterministic && parts == 1 && before.head >= 0) add_dq(before, turn ^ 1);
    if constexpr (!ScoreGradient::changes) make_weights(p, step, stage, any_far);
    multiply_rows<Element, VTile, OTile, v_steps>(ds, v_rows, o_rows);
    if constexpr (ScoreGradient::changes)
      differentiate(p, ds, step, stage, any_far);
    else
      make_gradients(ds, p, step, stage);
    const u32 o_columns = o_tile(stage) + OTile::lane_offset(lane_),
              q_columns = q_tile(stage) + QTile::lane_offset(lane_);
    if constexpr (parts == 1)
      add_own(p, ds, o_columns, q_columns, turn);
    else
      add_shared(p, ds, o_columns, q_columns, step);
  }

  // dV and dK of keys whose scores are in this warp's registers.
  FLASHJIT_FN void add_own(const float (&p)[m_tiles][q_tiles][4], const float (&ds)[m_tiles][q_tiles][4],
                           u32 o_columns, u32 q_columns, int turn) {
#pragma unroll
    for (int n = 0; n < q_tiles; n += 2) {
      u32 a[m_tiles][4];
      to_operand<Element>(a, p, n);
      add_product<Element, OTile>(dv_, a, o_columns, n * 8);
    }
#pragma unroll
    for (int n = 0; n < q_tiles; n += 2) {
      u32 a[m_tiles][4];
      to_operand<Element>(a, ds, n);
      if (!Spec::deterministic) Shared::store_scores(ds_tile(turn), a, n, lane_, warp_, part_);
      add_product<Element, QTile>(dk_, a, q_columns, n * 8);
    }
  }

  // The same where several warps have made the scores; and dQ.
  FLASHJIT_FN void add_shared(const float (&p)[m_tiles][q_tiles][4], const float (&ds)[m_tiles][q_tiles][4],
                              u32 o_columns, u32 q_columns, const Step& step) {
#pragma unroll
    for (int n = 0; n < q_tiles; n += 2) {
      u32 a[m_tiles][4];
      to_operand<Element>(a, p, n);
      Shared::store_scores(ds_tile(1), a, n, lane_, warp_, part_);
      to_operand<Element>(a, ds, n);
      Shared::store_scores(ds_tile(0), a, n, lane_, warp_, part_);
    }
    __syncthreads();
    const u32 rows = warp_ * warp_keys * DsTile::row_bytes + DsTile::lane_offset(lane_);
#pragma unroll
    for (int t = 0; t < block_m / 16; ++t) {
      u32 a[m_tiles][4];
      Shared::load_scores(a, ds_tile(1) + rows, t);
      add_product<Element, OTile>(dv_, a, o_columns, t * 16, part_ * v_tiles);
    }
    if constexpr (!Spec::deterministic) add_dq(step, 0);
#pragma unroll
    for (int t = 0; t < block_m / 16; ++t) {
      u32 a[m_tiles][4];
      Shared::load_scores(a, ds_tile(0) + rows, t);
      add_product<Element, QTile>(dk_, a, q_columns, t * 16, part_ * k_tiles);
    }
  }

  // The thread's pairs of tile i of its warp's keys, for formulas.
  FLASHJIT_FN auto place(const Problem& problem, int first_row, int i) const {
    return
        typename ScoreGradient::Place(p_, problem, first_row + static_cast<int>(warp_row() + lane_ % 4 * 2),
                                      warp_key() + i * 16 + static_cast<int>(lane_ / 4));
  }
  // Both at once, where formulas have derivatives: scores become weights, dP becomes dS.
  FLASHJIT_FN void differentiate(float (&s)[m_tiles][q_tiles][4], float (&dp)[m_tiles][q_tiles][4],
                                 const Step& step, int stage, bool any_far) {
    if (!step.block.whole) drop_masked(s, step, minus_infinity);
    if (clears_keys && bad_keys_) drop_bad_keys(s);
    const Problem problem = problem_of(step.head);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      u32 drops[ceil_div(q_tiles, 8)] = {};
      const auto numbers = [&](int n, float(&lse_log2)[2], float(&delta)[2], float(&far_max)[2]) {
        ld_pair(lse_log2, lse(stage), n);
        ld_pair(delta, this->delta(stage), n);
#pragma unroll
        for (int r = 0; r < 2; ++r) far_max[r] = any_far ? far_max_of(step)[n * 8 + r] : 0;
        if constexpr (Spec::dropout) {
          u32 w[4];
          ld_shared_v4(w, row_words(stage) + (warp_row() + n * 8 + lane_ % 4 * 2) * 8);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (dropped({w[e % 2 * 2], w[e % 2 * 2 + 1]}, column_words_[i][e / 2], p_.dropout.below))
              drops[n / 8] |= 1u << (n % 8 * 4 + e);
        }
      };
      const auto is_dropped = [&](int at) { return Spec::dropout && drops[at / 32] >> at % 32 & 1; };
      const auto change = [&](int at, float product) {
        if (!Spec::dropout) return product;
        return is_dropped(at) ? 0.f : product * p_.dropout.scale;
      };
      ScoreGradient::template differentiate<q_tiles * 8>(
          p_, s[i][0], dp[i][0], place(problem, step.block.index * block_m, i), terms_, numbers, change);
      if constexpr (Spec::dropout) {
#pragma unroll
        for (int at = 0; at < q_tiles * 4; ++at)
          s[i][at / 4][at % 4] = is_dropped(at) ? 0 : s[i][at / 4][at % 4] * p_.kept_scale();
      }
    }
  }

  // Scores become weights.
  FLASHJIT_FN void make_weights(float (&s)[m_tiles][q_tiles][4], const Step& step, int stage,
                                bool any_far) const {
    if constexpr (Score::changes) {
      const Problem problem = problem_of(step.head);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
        ScoreGradient::template modify<q_tiles * 8>(s[i][0], place(problem, step.block.index * block_m, i));
    }
    if (!isolates && !step.block.whole) drop_masked(s, step, minus_infinity);
    if (clears_keys && bad_keys_) drop_bad_keys(s);
    if (any_far)
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) subtract_far_max<q_tiles * 8>(s[i][0], far_max_of(step));
    const float scale_log2 = Score::scale_log2(p_);
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) {
      float lse_log2[2];
      ld_pair(lse_log2, lse(stage), n);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[i][n][e] = ex2_approx(__fmaf_rn(s[i][n][e], scale_log2, -lse_log2[e % 2]));
    }
    if (isolates && !step.block.whole) drop_masked(s, step, 0);
  }
  // Those of this thread's columns, from its first one on.
  FLASHJIT_FN const float* far_max_of(const Step& step) const {
    return p_.far_max + step.place + warp_row() + lane_ % 4 * 2;
  }
  FLASHJIT_FN void drop_bad_keys(float (&s)[m_tiles][q_tiles][4]) const {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int n = 0; n < q_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (bad_keys_ >> (2 * i + e / 2) & 1) s[i][n][e] = minus_infinity;
  }
  // Floats of query rows 8 * n + 2 * (lane % 4) + {0, 1}, this thread's columns.
  FLASHJIT_FN void ld_pair(float (&pair)[2], u32 from, int n) const {
    int words[2];
    ld_shared_v2(words[0], words[1], from + (warp_row() + n * 8 + lane_ % 4 * 2) * 4);
    pair[0] = __int_as_float(words[0]);
    pair[1] = __int_as_float(words[1]);
  }

  FLASHJIT_FN void drop_masked(float (&s)[m_tiles][q_tiles][4], const Step& step, float value) const {
    const Problem problem = problem_of(step.head);
    const Mask mask(p_, problem);
    const int first_row = step.block.index * block_m + static_cast<int>(warp_row() + lane_ % 4 * 2);
    if constexpr (has_formula<Mask>)
      drop_pairs<q_tiles * 8, m_tiles>(s[0][0], mask, problem, first_row,
                                       warp_key() + static_cast<int>(lane_ / 4), value,
                                       DropBy{*this, s, problem, first_row, value});
    else
      drop_by(s, mask, problem, first_row, value);
  }
  struct DropBy {
    const BackwardSm80& kernel;
    float (&s)[m_tiles][q_tiles][4];
    const Problem& problem;
    int first_row;
    float value;
    template <class Part>
    FLASHJIT_FN int operator()(const Part& part) const {
      return kernel.drop_by(s, part, problem, first_row, value);
    }
  };
  // By a mask without formulas, or with intervals. Returns its look-up of the warp's pairs.
  template <class Part>
  FLASHJIT_FN int drop_by(float (&s)[m_tiles][q_tiles][4], const Part& mask, const Problem& problem,
                          int first_row, float value) const {
    if constexpr (key_intervals<Part>) {
      // A key keeps an interval of rows, too. This thread's rows are 0, 1, 8, 9, 16, ... from first_row.
      // before(limit) counts those before `limit`.
      const auto before = [&](int limit) {
        const int n = min(max(limit - first_row, 0), warp_rows);
        return n / 8 * 2 + min(n % 8, 2);
      };
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = warp_key() + i * 16 + half * 8 + static_cast<int>(lane_ / 4);
          const Span kept = mask.hull(Queries{}, {key, key + 1});
          const u32 bits =
              key < problem.seqlen_k ? low_bits(before(kept.end)) & ~low_bits(before(kept.begin)) : 0;
#pragma unroll
          for (int n = 0; n < q_tiles; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
              if (!(bits >> (2 * n + c) & 1)) s[i][n][half * 2 + c] = value;
        }
      return not_found;
    } else {
      const int warp_first = first_row - static_cast<int>(lane_ % 4 * 2);
      const int found =
          mask.look_up({warp_first, warp_first + warp_rows}, {warp_key(), warp_key() + warp_keys});
      typename Part::Tile tile = mask.template tile<warp_rows, warp_keys>(found);
#pragma unroll
      for (int n = 0; n < q_tiles; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = first_row + n * 8 + c;
          u32 words[1];
          tile.template bits<warp_keys>(row, warp_key(), words);
          if (row >= problem.seqlen_q) words[0] = 0;
          words[0] >>= lane_ / 4;
#pragma unroll
          for (int i = 0; i < m_tiles; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              if (!(words[0] >> (i * 16 + half * 8) & 1)) s[i][n][half * 2 + c] = value;
        }
      return found;
    }
  }

  // dP becomes dS. With dropout the weights, which have its scale, become those that the product with V had.
  FLASHJIT_FN void make_gradients(float (&dp)[m_tiles][q_tiles][4], float (&p)[m_tiles][q_tiles][4],
                                  const Step& step, int stage) const {
#pragma unroll
    for (int n = 0; n < q_tiles; ++n) {
      float delta[2];
      ld_pair(delta, this->delta(stage), n);
      [[maybe_unused]] RowWords words[2];
      if constexpr (Spec::dropout) {
        u32 w[4];
        ld_shared_v4(w, row_words(stage) + (warp_row() + n * 8 + lane_ % 4 * 2) * 8);
        words[0] = {w[0], w[1]};
        words[1] = {w[2], w[3]};
      }
#pragma unroll
      for (int i = 0; i < m_tiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& weight = p[i][n][e];
          const float whole = weight;
          if constexpr (Spec::dropout) {
            const bool drops = dropped(words[e % 2], column_words_[i][e / 2], p_.dropout.below);
            if (drops) dp[i][n][e] = weight = 0;
          }
          dp[i][n][e] = whole * (dp[i][n][e] - delta[e % 2]);
          // A dropped pair may be NaN in dO V^T.
          if (!step.block.whole && whole == 0) dp[i][n][e] = 0;
        }
    }
  }

  // dQ += dS K
  FLASHJIT_FN void add_dq(const Step& step, int turn) const {
    const u32 warp = tid_x() / 32, row_warp = warp % dq_row_warps, column_warp = warp / dq_row_warps;
    const u32 ds = ds_tile(turn) + DsTile::lane_offset_b(lane_);
    const u32 k = shared_ + layout.k + KTile::lane_offset(lane_);
    float* const dq_sums = p_.dq_sums + step.place * (k_steps * 16);
#pragma unroll
    for (int first = 0; first < dq_pairs; first += dq_at_once) {
      float dq[dq_m_tiles][dq_at_once * 2][4];
      clear(dq);
#pragma unroll
      for (int key = 0; key < block_n; key += 16) {
        u32 a[dq_m_tiles][4];
#pragma unroll
        for (int i = 0; i < dq_m_tiles; ++i)
          ldmatrix_x4_trans(a[i], DsTile::at(ds, key, (row_warp * dq_m_tiles + i) * 2));
#pragma unroll
        for (int pair = 0; pair < min(dq_at_once, dq_pairs - first); ++pair) {
          if (column_warp * dq_pairs + first + pair >= k_steps) break;
          u32 b[4];
          ldmatrix_x4_trans(b, KTile::at(k, key, (column_warp * dq_pairs + first + pair) * 2));
#pragma unroll
          for (int i = 0; i < dq_m_tiles; ++i) {
            mma_m16n8k16(Element{}, dq[i][pair * 2], a[i], b[0], b[1]);
            mma_m16n8k16(Element{}, dq[i][pair * 2 + 1], a[i], b[2], b[3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < dq_m_tiles; ++i)
#pragma unroll
        for (int c = 0; c < min(dq_at_once, dq_pairs - first) * 2; ++c) {
          const u32 column = (column_warp * dq_pairs + first) * 2 + c;
          if (column >= k_steps * 2) break;
          add_tile(dq_sums + ((row_warp * dq_m_tiles + i) * (k_steps * 2) + column) * 128, dq[i][c]);
        }
    }
  }
  FLASHJIT_FN void add_tile(float* to, const float (&d)[4]) const {
#if __CUDA_ARCH__ >= 900
    red_add_v4(to + backward_sum_place(lane_, 0), d);
#else
#pragma unroll
    for (u32 e = 0; e < 4; ++e) red_add(to + backward_sum_place(lane_, e), d[e]);
#endif
  }

  FLASHJIT_FN void finish(const Problem& problem) const {
    const int slot_keys = make_problem<Spec::varlen>(p_, batch_, 0).seqlen_k;
    const auto rows_of = [&](const TensorView& t) {
      Gradient* const first =
          static_cast<Gradient*>(t.data) + problem.k_offset(t) + first_key_ * t.row_stride;
      return [this, first, slot_keys, stride = t.row_stride](u32 row) -> Gradient* {
        return first_key_ + static_cast<int>(row) < slot_keys ? first + row * stride : nullptr;
      };
    };
    store_rows<Spec::batch_invariant, Gradient, KTile>(dk_, p_.scale, shared_ + layout.k, warp_ * warp_keys,
                                                       lane_, rows_of(p_.dk), part_ * k_tiles,
                                                       Spec::head_dim / 8);
    store_rows<Spec::batch_invariant, Gradient, VTile>(dv_, p_.dv_scale, shared_ + layout.v,
                                                       warp_ * warp_keys, lane_, rows_of(p_.dv),
                                                       part_ * v_tiles, Spec::head_dim_v / 8);
  }

  const CudaBackwardParams& p_;
  const u32 shared_;
  const int batch_, head_kv_, first_key_;
  const u32 lane_, warp_, part_;  // warp_: of those that share no keys
  float dk_[m_tiles][k_tiles][4], dv_[m_tiles][v_tiles][4];
  Words key_;                     // with dropout
  u32 column_words_[m_tiles][2];  // with dropout
  // The gradients of learned tables, as far as this thread has added them up.
  [[no_unique_address]] typename TermsOf<ScoreGradient, Spec::deterministic>::type terms_;
  u32 bad_keys_;  // if `clears_keys`: a bit for each of the thread's keys
};

template <class Spec, class Config>
FLASHJIT_FN void backward_sm80(const CudaBackwardParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  BackwardSm80<Spec, Config>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
