// Attention forward with mma.sync, ldmatrix and cp.async: every GPU from sm_80 up.
//
// One block of threads computes block_m query rows of one (batch entry, query head); a warp owns block_m /
// num_warps of them (16 or 32) whole, so that its softmax needs no other warp. Scores, probabilities and
// output stay in registers. Online softmax (Milakov and Gimelshein 2018, Dao 2023) in base 2: exp(scale * s -
// m) = ex2(s * scale_log2 - m_log2), one FFMA and one MUFU. The output is rescaled only when a row's maximum
// grew by more than 2^8, which leaves probabilities at most 256 and changes nothing in the result; row sums
// stay per lane until the end.
//
// q, k, v, o: 16-byte aligned data, strides that are multiples of 8 elements.
#pragma once

#include "cuda/tile.cuh"
#include "cuda/tile_order.cuh"
#include "shared/mask.h"

namespace flashjit::device {

template <class Spec, class Config>
class ForwardSm80 {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;

  static constexpr int threads = Config::num_warps * 32;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr int warp_rows = block_m / Config::num_warps;
  static constexpr int m_tiles = warp_rows / 16;  // 16-row tiles of a warp
  static constexpr int n_tiles = block_n / 8;     // 8-key tiles of a block
  static constexpr int k_steps = ceil_div(Spec::head_dim, 16);
  static constexpr int o_tiles = Spec::head_dim_v / 8;  // 8-column tiles of the output
  static_assert(warp_rows % 16 == 0 && block_n % 16 == 0 &&
                (Config::num_stages == 1 || Config::num_stages == 2));

  using QTile = SharedTile<block_m, k_steps * 2>;
  using KTile = SharedTile<block_n, k_steps * 2>;
  using VTile = SharedTile<block_n, o_tiles>;
  using OTile = SharedTile<block_m, o_tiles>;
  static constexpr int stage_bytes = KTile::bytes + VTile::bytes;
  static_assert(max(QTile::bytes + Config::num_stages * stage_bytes, OTile::bytes) ==
                cuda_forward_shared_memory(Spec::head_dim, Spec::head_dim_v, block_m, block_n,
                                           Config::num_stages));

  // Q in registers saves a third of the shared-memory traffic of the scores, where registers are left for it.
  static constexpr bool q_in_registers = m_tiles * 4 * (n_tiles + o_tiles + k_steps) <= 192;

 public:
  FLASHJIT_FN static void run(const ForwardParams& p, u32 shared) {
    const TileIndex tile =
        tile_index(p, static_cast<int>(blockIdx.x), block_m, 2 * (Spec::head_dim + Spec::head_dim_v));
    const Problem problem = make_problem<Spec::varlen>(p, tile.batch, tile.head_q);
    const int first_row = tile.m_block * block_m;
    if (first_row >= problem.seqlen_q) return;
    ForwardSm80(p, problem, shared, first_row).run(problem);
  }

 private:
  FLASHJIT_FN ForwardSm80(const ForwardParams& p, const Problem& problem, u32 shared, int first_row)
      : p_(p),
        batch_(problem.batch),
        head_q_(problem.head_q),
        seqlen_q_(problem.seqlen_q),
        mask_(p, problem),
        shared_(shared),
        first_row_(first_row),
        warp_row_(threadIdx.x / 32 * warp_rows),
        lane_(threadIdx.x % 32),
        scale_log2_(p.softmax_scale * log2_e) {}

  FLASHJIT_FN Span rows() const { return {first_row_, min(first_row_ + block_m, seqlen_q_)}; }
  // The row, within this block, that holds accumulator elements 2 * half and 2 * half + 1 of tile i.
  FLASHJIT_FN u32 lane_row(int i, int half) const { return warp_row_ + i * 16 + half * 8 + lane_ / 4; }
  FLASHJIT_FN u32 q_tile() const { return shared_; }
  FLASHJIT_FN u32 k_tile(int stage) const { return shared_ + QTile::bytes + stage * stage_bytes; }
  FLASHJIT_FN u32 v_tile(int stage) const { return k_tile(stage) + KTile::bytes; }

  FLASHJIT_FN void run(const Problem& problem) {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        max_[i][half] = minus_infinity;
        sum_[i][half] = 0;
      }
#pragma unroll
      for (int c = 0; c < o_tiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[i][c][e] = 0;
    }

    const TileCopy<KTile, Spec::head_dim, threads> copy_k(
        static_cast<const Element*>(p_.k.data) + problem.k_offset, p_.k.row_stride, threadIdx.x);
    const TileCopy<VTile, Spec::head_dim_v, threads> copy_v(
        static_cast<const Element*>(p_.v.data) + problem.v_offset, p_.v.row_stride, threadIdx.x);
    const TileCopy<QTile, Spec::head_dim, threads> copy_q(
        static_cast<const Element*>(p_.q.data) + problem.q_offset, p_.q.row_stride, threadIdx.x);
    const int seqlen_k = problem.seqlen_k;

    BlockWalk<Keys, Mask> walk(mask_, rows(), block_n);
    Block block, next;
    bool more = walk.next(next);
    copy_q(q_tile(), first_row_, problem.seqlen_q);
    cp_async_commit_group();
    if (more) copy_k(k_tile(0), next.index * block_n, seqlen_k);
    if (Config::num_stages == 2 && more) copy_v(v_tile(0), next.index * block_n, seqlen_k);
    cp_async_commit_group();
    load_q();

    if constexpr (Config::num_stages == 1) {
      // V arrives while the scores are computed, the next K during softmax and output.
      while (more) {
        block = next;
        wait_and_sync<0>();
        copy_v(v_tile(0), block.index * block_n, seqlen_k);
        cp_async_commit_group();
        compute_scores(k_tile(0));
        more = walk.next(next);
        wait_and_sync<0>();
        if (more) copy_k(k_tile(0), next.index * block_n, seqlen_k);
        cp_async_commit_group();
        if (!block.whole) apply_mask(block.index * block_n);
        accumulate(v_tile(0));
      }
    } else {
      // The next K and V arrive during a whole step; one barrier says both "arrived" and "the other stage is
      // free".
      int stage = 0;
      while (more) {
        block = next;
        wait_and_sync<0>();
        more = walk.next(next);
        if (more) {
          copy_k(k_tile(stage ^ 1), next.index * block_n, seqlen_k);
          copy_v(v_tile(stage ^ 1), next.index * block_n, seqlen_k);
        }
        cp_async_commit_group();
        compute_scores(k_tile(stage));
        if (!block.whole) apply_mask(block.index * block_n);
        accumulate(v_tile(stage));
        stage ^= 1;
      }
    }
    wait_and_sync<0>();
    finish();
  }

  template <int pending>
  FLASHJIT_FN static void wait_and_sync() {
    cp_async_wait_group<pending>();
    __syncthreads();
  }

  FLASHJIT_FN void load_q() {
    q_address_ = q_tile() + warp_row_ * QTile::row_bytes + QTile::lane_offset(lane_);
    if constexpr (q_in_registers) {
      wait_and_sync<1>();
#pragma unroll
      for (int step = 0; step < k_steps; ++step) load_q(q_[step], step);
    }
  }
  FLASHJIT_FN void load_q(u32 (&q)[m_tiles][4], int step) const {
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) ldmatrix_x4(q[i], QTile::at(q_address_, i * 16, step * 2));
  }

  // s = q k^T
  FLASHJIT_FN void compute_scores(u32 k_tile) {
    const u32 k_address = k_tile + KTile::lane_offset_b(lane_);
#pragma unroll
    for (int i = 0; i < m_tiles; ++i)
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s_[i][n][e] = 0;
#pragma unroll
    for (int step = 0; step < k_steps; ++step) {
      if constexpr (!q_in_registers) load_q(q_[0], step);
      const auto& q = q_[q_in_registers ? step : 0];
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        u32 k[4];
        ldmatrix_x4(k, KTile::at(k_address, n * 8, step * 2));
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          mma_m16n8k16(Element{}, s_[i][n], q[i], k[0], k[1]);
          mma_m16n8k16(Element{}, s_[i][n + 1], q[i], k[2], k[3]);
        }
      }
    }
  }

  FLASHJIT_FN void apply_mask(int first_key) {
    const int key = first_key + static_cast<int>(lane_ % 4 * 2);
    const typename Mask::Tile tile = mask_.tile(rows(), {first_key, first_key + block_n});
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + static_cast<int>(lane_row(i, half));
        const Span kept = mask_.hull(Keys{}, Span{row, row + 1});
        const u32 from_begin = key - kept.begin, size = max(kept.size(), 0);
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int offset = n * 8 + e;
            const bool keep = Mask::row_intervals ? from_begin + offset < size : tile.keep(row, key + offset);
            if (!keep) s_[i][n][half * 2 + e] = minus_infinity;
          }
        }
      }
    }
  }

  // Online softmax of s_, then o += p v.
  FLASHJIT_FN void accumulate(u32 v_tile) {
    constexpr float threshold = 8;  // log2
    float max_log2[m_tiles][2], factor[m_tiles][2];
    bool rescale = false;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m = max_[i][half];
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) m = fmaxf(m, fmaxf(s_[i][n][half * 2], s_[i][n][half * 2 + 1]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        const float growth = (m - max_[i][half]) * scale_log2_;
        const bool grew = growth > threshold;  // false for -inf - -inf
        factor[i][half] = grew ? ex2_approx(-growth) : 1.0f;
        max_[i][half] = grew ? m : max_[i][half];
        max_log2[i][half] = max_[i][half] == minus_infinity ? 0.0f : max_[i][half] * scale_log2_;
        rescale |= grew;
      }
    }
    if (__any_sync(0xffffffffu, rescale)) {
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        sum_[i][0] *= factor[i][0];
        sum_[i][1] *= factor[i][1];
#pragma unroll
        for (int c = 0; c < o_tiles; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[i][c][e] *= factor[i][e / 2];
      }
    }

    const u32 v_address = v_tile + VTile::lane_offset(lane_);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      // Two 8-key score tiles are one 16-key operand tile, element for element.
      u32 probabilities[m_tiles][4];
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int half = j % 2;
          const float* s = s_[i][n + j / 2] + half * 2;
          const float low = ex2_approx(s[0] * scale_log2_ - max_log2[i][half]);
          const float high = ex2_approx(s[1] * scale_log2_ - max_log2[i][half]);
          sum_[i][half] += low + high;
          probabilities[i][j] = cvt_rn_x2(Element{}, low, high);
        }
      }
#pragma unroll
      for (int c = 0; c < o_tiles; c += 2) {
        u32 v[4];
        if (c + 1 < o_tiles) {
          ldmatrix_x4_trans(v, VTile::at(v_address, n * 8, c));
        } else {
          ldmatrix_x2_trans(v[0], v[1], VTile::at(v_address, n * 8, c));
        }
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
          mma_m16n8k16(Element{}, o_[i][c], probabilities[i], v[0], v[1]);
          if (c + 1 < o_tiles) mma_m16n8k16(Element{}, o_[i][c + 1], probabilities[i], v[2], v[3]);
        }
      }
    }
  }

  // Normalises, writes lse, and o through shared memory (which nothing else uses any more) in 16-byte stores.
  FLASHJIT_FN void finish() {
    const Problem problem =
        make_problem<Spec::varlen>(p_, batch_, head_q_);  // again: cheaper than registers held
    const u32 o_tile = shared_;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sum_[i][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const bool empty = sum == 0;
        const float inverse = rcp_approx(sum);
        const u32 row = lane_row(i, half);
        const int position = first_row_ + static_cast<int>(row);
        if constexpr (Spec::lse) {
          if (lane_ % 4 == 0 && position < seqlen_q_) {
            static_cast<float*>(p_.lse.data)[problem.lse_offset + position * p_.lse.row_stride] =
                empty ? minus_infinity : (max_[i][half] * scale_log2_ + lg2_approx(sum)) * ln_2;
          }
        }
        const u32 address = o_tile + OTile::offset(row, 0) + lane_ % 4 * 4;
#pragma unroll
        for (int c = 0; c < o_tiles; ++c) {
          const u32 value =
              cvt_rn_x2(Element{}, o_[i][c][half * 2] * inverse, o_[i][c][half * 2 + 1] * inverse);
          st_shared(OTile::at(address, 0, c), empty ? 0 : value);
        }
      }
    }
    __syncwarp();
    Element* o = static_cast<Element*>(p_.o.data) + problem.o_offset;
#pragma unroll 4
    for (u32 index = lane_; index < warp_rows * o_tiles; index += 32) {
      const u32 row = warp_row_ + index / o_tiles, chunk = index % o_tiles;
      const int position = first_row_ + static_cast<int>(row);
      u32 value[4];
      ld_shared_v4(value, o_tile + OTile::offset(row, chunk));
      if (position < seqlen_q_) st_global_v4(o + position * p_.o.row_stride + chunk * 8, value);
    }
  }

  const ForwardParams& p_;
  const int batch_, head_q_, seqlen_q_;
  const Mask mask_;
  const u32 shared_;
  const int first_row_;
  const u32 warp_row_, lane_;
  const float scale_log2_;
  u32 q_address_;
  u32 q_[q_in_registers ? k_steps : 1][m_tiles][4];
  float s_[m_tiles][n_tiles][4], o_[m_tiles][o_tiles][4];
  float max_[m_tiles][2], sum_[m_tiles][2];  // of raw scores; this lane's share
};

template <class Spec, class Config>
FLASHJIT_FN void forward_sm80(const ForwardParams& params) {
  extern __shared__ __align__(128) char shared_memory[];
  ForwardSm80<Spec, Config>::run(params, shared_address(shared_memory));
}

}  // namespace flashjit::device
