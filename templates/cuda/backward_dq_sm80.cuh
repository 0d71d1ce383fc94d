// dQ alone with mma.sync, where sums must have equal bits run after run: a block of threads has block_m query
// rows of a head and passes the keys by, as the forward does. A warp owns whole rows. dS stays in registers
// as an operand of dQ += dS K.
#pragma once

#include "cuda/backward_rows.cuh"
#include "cuda/dropout.cuh"
#include "cuda/mma_products.cuh"
#include "cuda/online_softmax.cuh"

namespace flashjit::device {

template <class Spec, class Config>
class BackwardDqSm80 {
  using Element = typename Spec::Element;
  using Gradient = typename OutputElement<typename Spec::grad_dtype, Element>::type;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;

  static constexpr int num_warps = Config::num_warps, threads = num_warps * 32;
  static constexpr int block_m = backward_dq_rows(num_warps),
                       block_n = backward_dq_keys(Spec::head_dim, Spec::head_dim_v);
  static constexpr int warp_rows = block_m / num_warps, m_tiles = warp_rows / 16, n_tiles = block_n / 8;
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16), v_steps = ceil_div(Spec::head_dim_v, 16);
  static constexpr int k_tiles = Spec::head_dim / 8;

  using QTile = SharedTile<block_m, k_steps * 2>;
  using OTile = SharedTile<block_m, v_steps * 2>;
  using KTile = SharedTile<block_n, k_steps * 2>;
  using VTile = SharedTile<block_n, v_steps * 2>;
  static constexpr CudaBackwardDqLayout layout{Spec::head_dim, Spec::head_dim_v, block_m, block_n, 2,
                                               Spec::dropout};

 public:
  FLASHJIT_FN static void run(const CudaBackwardParams& p, u32 shared) {
    const u32 row_blocks = static_cast<u32>(max(ceil_div(p.seqlen_q, block_m), 1));
    const u32 index = ctaid_x() / row_blocks;
    // The last rows first: with a causal mask they see the most keys.
    const int first_row = static_cast<int>(row_blocks - 1 - ctaid_x() % row_blocks) * block_m;
    const int batch = static_cast<int>(index / p.num_heads_q);
    const Problem problem =
        make_problem<Spec::varlen, Mask::padding>(p, batch, static_cast<int>(index) - batch * p.num_heads_q);
    if (first_row < problem.rows) BackwardDqSm80(p, problem, shared, first_row).run();
  }

 private:
  FLASHJIT_FN BackwardDqSm80(const CudaBackwardParams& p, const Problem& problem, u32 shared, int first_row)
      : p_(p),
        problem_(problem),
        mask_(p, problem),
        shared_(shared),
        first_row_(first_row),
        lane_(tid_x() % 32),
        warp_(tid_x() / 32) {}

  FLASHJIT_FN Span rows() const { return {first_row_, min(first_row_ + block_m, problem_.seqlen_q)}; }
  // The row, within the tile, of elements 2 * half and 2 * half + 1 of accumulator tile i.
  FLASHJIT_FN int row_of(int i, int half) const {
    return static_cast<int>(warp_ * warp_rows + i * 16 + half * 8 + lane_ / 4);
  }
  FLASHJIT_FN u32 k_tile(int stage) const { return shared_ + layout.k + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 v_tile(int stage) const { return shared_ + layout.v + stage * layout.stage_bytes; }
  FLASHJIT_FN u32 column_words(int stage) const {
    return shared_ + layout.column_words + stage * layout.stage_bytes;
  }

  FLASHJIT_FN void run() {
    clear(dq_);
    copy<QTile, Spec::head_dim>(shared_ + layout.q, p_.q, problem_.q_offset(p_.q), first_row_,
                                problem_.seqlen_q);
    copy<OTile, Spec::head_dim_v>(shared_ + layout.d_o, p_.d_o, problem_.q_offset(p_.d_o), first_row_,
                                  problem_.seqlen_q);
    cp_async_commit_group();
    if constexpr (Spec::dropout) make_words();
    griddepcontrol_wait();  // for lse_log2 and delta
    const i64 place =
        problem_.head_q * p_.rows + p_.first_row(problem_.batch, problem_.first_q, Spec::varlen) + first_row_;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        lse_log2_[i][half] = p_.lse_log2[place + row_of(i, half)];
        delta_[i][half] = p_.delta[place + row_of(i, half)];
        far_max_[i][half] = p_.far_max[place + row_of(i, half)];
      }
    any_far_ = far_marks<warp_rows>(p_, place + warp_ * warp_rows) != 0;

    BlockWalk<Keys, Mask> walk(mask_, rows(), block_n);
    Block next;
    bool more = walk.next(next);
    if (more) load(next, 0);
    cp_async_commit_group();
    for (int stage = 0; more; stage ^= 1) {
      Block block = next;
      // Rows of the tile beyond the sequence are none of rows().
      block.whole = block.whole && rows().size() == block_m;
      cp_async_wait_group<0>();
      __syncthreads();
      more = walk.next(next);
      if (more) load(next, stage ^ 1);
      cp_async_commit_group();
      compute(block, stage);
    }
    cp_async_wait_group<0>();
    __syncthreads();
    Gradient* const first =
        static_cast<Gradient*>(p_.dq.data) + problem_.q_offset(p_.dq) + first_row_ * p_.dq.row_stride;
    store_rows<Spec::batch_invariant, Gradient, QTile>(
        dq_, p_.scale, shared_ + layout.q, warp_ * warp_rows, lane_,
        [&](u32 row) -> Gradient* {
          return first_row_ + static_cast<int>(row) < problem_.rows ? first + row * p_.dq.row_stride
                                                                    : nullptr;
        },
        0, k_tiles);
  }

  template <class Tile, int head_dim>
  FLASHJIT_FN void copy(u32 to, const TensorView& t, i64 offset, int first, int end) const {
    TileCopy<Tile, head_dim, threads>(static_cast<const Element*>(t.data) + offset, t.row_stride, tid_x())(
        to, first, end);
  }
  FLASHJIT_FN void load(const Block& block, int stage) const {
    const int first = block.index * block_n;
    copy<KTile, Spec::head_dim>(k_tile(stage), p_.k, problem_.k_offset(p_.k), first, problem_.seqlen_k);
    copy<VTile, Spec::head_dim_v>(v_tile(stage), p_.v, problem_.k_offset(p_.v), first, problem_.seqlen_k);
    if constexpr (Spec::dropout) {
      const int part = static_cast<int>(tid_x());
      if (part < block_n / 4)
        st_column_words(column_words(stage), part,
                        column_words_at<typename Spec::Offsets>(p_, key_, first / 4 + part, problem_.batch));
    }
  }
  FLASHJIT_FN void make_words() {
    key_ = dropout_key(p_.dropout);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        row_words_[i][half] = row_words_at<typename Spec::Offsets>(p_, key_, first_row_ + row_of(i, half),
                                                                   problem_.head_q, problem_.batch);
  }

  FLASHJIT_FN void compute(const Block& block, int stage) {
    float p[m_tiles][n_tiles][4], ds[m_tiles][n_tiles][4];
    const u32 q = shared_ + layout.q + warp_ * warp_rows * QTile::row_bytes + QTile::lane_offset(lane_);
    const u32 d_o = shared_ + layout.d_o + warp_ * warp_rows * OTile::row_bytes + OTile::lane_offset(lane_);
    multiply_rows<Element, QTile, KTile, k_steps>(p, q, k_tile(stage) + KTile::lane_offset_b(lane_));
    multiply_rows<Element, OTile, VTile, v_steps>(ds, d_o, v_tile(stage) + VTile::lane_offset_b(lane_));
    if constexpr (isolates_dropped<Mask>) clear_bad_keys(p, k_tile(stage));
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
      if (!block.whole) {
        const auto rows_of_tile = [&](int row) { return first_row_ + row_of(i, row / 8); };
        if constexpr (has_formula<Mask>)
          mask_elements<block_m, block_n>(
              p[i][0], mask_, rows_of_tile, [&](int) { return problem_.head_q; }, block, lane_);
        else
          mask_scores<block_m, block_n>(p[i][0], mask_, rows_of_tile, block, lane_);
      }
      if (!Score::changes && any_far_) {
#pragma unroll
        for (int n = 0; n < n_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[i][n][e] = below_far_max(p[i][n][e], far_max_[i][e / 2]);
      }
#pragma unroll
      for (int n = 0; n < n_tiles; ++n) {
        [[maybe_unused]] u32 columns[4];
        if constexpr (Spec::dropout) ld_column_words(columns, column_words(stage), n / 2, lane_);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float dp = ds[i][n][e];
          if constexpr (Spec::dropout)
            dp = dropped(row_words_[i][e / 2], columns[n % 2 * 2 + e % 2], p_.dropout.below) ? 0
                 : ScoreGradient::changes ? dp * p_.dropout.scale
                                          : dp;  // weights have the scale
          if constexpr (Score::changes) {
            const int first_key = block.index * block_n + static_cast<int>(lane_ % 4) * 2;
            ds[i][n][e] = ScoreGradient::of_pair(p_, problem_, first_row_ + row_of(i, e / 2), first_key,
                                                 n * 8 + e % 2, p[i][n][e], lse_log2_[i][e / 2],
                                                 far_max_[i][e / 2], dp, delta_[i][e / 2]);
            continue;
          }
          const float weight = ex2_approx(__fmaf_rn(p[i][n][e], p_.scale_log2, -lse_log2_[i][e / 2]));
          ds[i][n][e] = weight * (dp - delta_[i][e / 2]);
          // A dropped pair may be NaN in dO V^T.
          if (!block.whole && weight == 0) ds[i][n][e] = 0;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      u32 a[m_tiles][4];
      to_operand<Element>(a, ds, n);
      add_product<Element, KTile>(dq_, a, k_tile(stage) + KTile::lane_offset(lane_), n * 8);
    }
  }

  // Makes zeros of keys whose K is not finite. No row's score with such a key is finite, so either all warps
  // find one or none does.
  FLASHJIT_FN void clear_bad_keys(const float (&s)[m_tiles][n_tiles][4], u32 tile) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum = __fmaf_rn(s[i][n][e], 0, sum);
    if (!__any_sync(0xffffffff, sum != 0)) return;
    const RowOfTile<Element, KTile> k{tile, 0, 1};
    if (!k.any_bad(block_n, lane_)) return;
    __syncthreads();  // everybody has its scores and has found the keys
    k.clear_bad(block_n, lane_);
    __syncthreads();
  }

  const CudaBackwardParams& p_;
  const Problem problem_;
  const Mask mask_;
  const u32 shared_;
  const int first_row_;
  const u32 lane_, warp_;
  float dq_[m_tiles][k_tiles][4];
  float lse_log2_[m_tiles][2], delta_[m_tiles][2], far_max_[m_tiles][2];
  bool any_far_;
  Words key_;                       // with dropout
  RowWords row_words_[m_tiles][2];  // with dropout
};

template <class Spec, class Config>
FLASHJIT_FN void backward_dq_sm80(const CudaBackwardParams& params) {
  extern __shared__ __align__(1024) char dynamic_shared[];
  BackwardDqSm80<Spec, Config>::run(params, shared_address(dynamic_shared));
}

}  // namespace flashjit::device
