// Rows of a backward whose lse is so far from 0 that float32 has lost the logarithm of their sum of weights.
// The first step finds the maximum and the sum of such a row again, and no rounding of lse reaches its
// weights:
//   weight = exp2((score - maximum) * scale_log2 - log2(sum)) <= 1
// The kernels that follow take differences before they scale. Next to 2^20 two scores differ by 1/8 or not at
// all, so they must see the same scores, bit for bit. So the product here is theirs: S^T = K Q^T, 16 columns
// at a time in their order, and formulas and masks are those of their fragments.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/backward_cuda_params.h"
#include "shared/mask.h"
#include "shared/score.h"

namespace flashjit::device {

// The largest |lse| of a row that is not far. Up to the weight, lse * log2(e) is rounded at most five times,
// by 2^-24 of itself each: the maximum times the scale, the sum, and its product with ln(2) in a forward, the
// product with log2(e) and the scale here. So a weight errs by 5 ln(2) log2(e) 2^-24 |lse| = 5 |lse| 2^-24,
// which here is less than the rounding of the weight to 16 bits, 2^-8 or 2^-11 of itself.
FLASHJIT_FN constexpr float farthest_lse(bf16) {
  return 1 << 13;
}
FLASHJIT_FN constexpr float farthest_lse(fp16) {
  return 1 << 10;
}

// A row's weights are exp2((score - top) * scale_log2 - log2_sum).
struct RowSum {
  float top, log2_sum;
};

// By a warp, for four rows of its own from `first_row` on. A lane gets those of row lane / 8.
template <class Spec>
class FarRows {
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  static constexpr int rows = 4, tile_keys = 16, block_keys = 64;
  static constexpr u32 all_lanes = 0xffffffff;

 public:
  FLASHJIT_FN FarRows(const CudaBackwardParams& p, const Problem& problem, int first_row)
      : p_(p),
        problem_(problem),
        lane_(tid_x() % 32),
        scale_log2_(Score::scale_log2(p)),
        first_row_(first_row),
        own_row_(first_row + static_cast<int>(lane_ % 2 * 2)) {}

  // lse_log2: of the lane's row, as it is given.
  FLASHJIT_FN RowSum find(float lse_log2) {
    const Mask mask(p_, problem_);
    BlockWalk<Keys, Mask> walk(mask, {first_row_, min(first_row_ + rows, problem_.seqlen_q)}, block_keys);
#pragma unroll 1
    for (Block block; walk.next(block);) {
      const Span keys = intersect(block_span(block.index, block_keys), {0, problem_.seqlen_k});
#pragma unroll 1
      for (int key = keys.begin; key < keys.end; key += tile_keys) add(mask, block.whole, key);
    }
    // Eight lanes have the same rows, but other keys.
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int lanes = 16; lanes >= 4; lanes /= 2) {
        const float top = __shfl_xor_sync(all_lanes, top_[r], lanes),
                    sum = __shfl_xor_sync(all_lanes, sum_[r], lanes);
        raise(r, top);
        if (sum != 0) sum_[r] = __fmaf_rn(sum, weight(r, top), sum_[r]);
      }
    const u32 row = lane_ / 8;
    const float even_top = __shfl_sync(all_lanes, top_[0], row / 2),
                odd_top = __shfl_sync(all_lanes, top_[1], row / 2),
                even_sum = __shfl_sync(all_lanes, sum_[0], row / 2),
                odd_sum = __shfl_sync(all_lanes, sum_[1], row / 2);
    RowSum found = row % 2 == 0 ? with_sink(even_top, even_sum) : with_sink(odd_top, odd_sum);
    // An lse that is larger by more than roundings is a merge's, of more keys than these.
    const float given = __fmaf_rn(-found.top, scale_log2_, lse_log2);
    if (given - found.log2_sum > fabsf(lse_log2) * 0x1p-20f) found.log2_sum = given;
    return found;
  }

 private:
  // The scores of 16 keys. Each row has two of the product's eight columns.
  FLASHJIT_FN void add(const Mask& mask, bool whole, int key) {
    const int column = static_cast<int>(lane_ % 4 * 2), last_key = problem_.seqlen_k - 1;
    const int first = key + static_cast<int>(lane_ / 4);
    const Element* const q =
        row_of(p_.q, problem_.q_offset(p_.q),
               min(first_row_ + static_cast<int>(lane_ / 4 % rows), problem_.seqlen_q - 1));
    const Element* const k[2] = {row_of(p_.k, problem_.k_offset(p_.k), min(first, last_key)),
                                 row_of(p_.k, problem_.k_offset(p_.k), min(first + 8, last_key))};
    float scores[4] = {};
#pragma unroll 1
    for (int step = 0; step < ceil_div(Spec::head_dim, 16); ++step) {
      const int low = step * 16 + column, high = low + 8;
      const u32 a[4] = {load(k[0], low), load(k[1], low), load(k[0], high), load(k[1], high)};
      mma_m16n8k16(Element{}, scores, a, load(q, low), load(q, high));
    }
    if constexpr (Score::changes)
      ScoreGradient::template modify<8>(scores, typename ScoreGradient::Place(p_, problem_, own_row_, first));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!whole && !mask.keep(own_row_ + j % 2, first + j / 2 * 8)) continue;
      if (scores[j] == minus_infinity) continue;
      raise(j % 2, scores[j]);
      sum_[j % 2] += weight(j % 2, scores[j]);
    }
  }
  FLASHJIT_FN static const Element* row_of(const TensorView& t, i64 offset, int row) {
    return static_cast<const Element*>(t.data) + offset + row * t.row_stride;
  }
  // Two elements; zeros behind the last column.
  FLASHJIT_FN static u32 load(const Element* row, int column) {
    if (Spec::head_dim % 16 && column >= Spec::head_dim) return 0;
    return __float_as_uint(ld_global_nc(reinterpret_cast<const float*>(row + column)));
  }

  FLASHJIT_FN float weight(int r, float score) const {
    return ex2_approx(__fmul_rn(score - top_[r], scale_log2_));
  }
  FLASHJIT_FN void raise(int r, float score) {
    const float before = top_[r];
    top_[r] = fmaxf(before, score);
    if (sum_[r] != 0) sum_[r] *= weight(r, before);
  }
  FLASHJIT_FN RowSum with_sink(float top, float sum) const {
    float log2_sum = lg2_approx(sum);
    if constexpr (Spec::Sinks::exist) {
      if (top == minus_infinity) return {0, Spec::Sinks::log2(p_, problem_.head_q)};
      const float of_sink = Spec::Sinks::template log2_above<Score>(p_, problem_.head_q, top),
                  largest = fmaxf(log2_sum, of_sink);
      log2_sum = largest + lg2_approx(ex2_approx(log2_sum - largest) + ex2_approx(of_sink - largest));
    }
    if (top == minus_infinity) return {0, -minus_infinity};  // no forward's lse: no key has a weight
    return {top, log2_sum};
  }

  const CudaBackwardParams& p_;
  const Problem& problem_;
  const u32 lane_;
  const float scale_log2_;
  const int first_row_, own_row_;  // own: the first of the lane's two
  float top_[2] = {minus_infinity, minus_infinity}, sum_[2] = {};
};

// Not 0 if one of `rows` rows of the workspace has a far_max. Both are multiples of 16.
template <int rows>
FLASHJIT_FN u32 far_marks(const CudaBackwardParams& p, i64 first) {
  static_assert(rows % 16 == 0);
  const u32* const marks = reinterpret_cast<const u32*>(p.far_marks + first / 4);
  u32 any = 0;
#pragma unroll
  for (int i = 0; i < rows / 16; ++i) any |= marks[i];
  return any;
}

// A score of a row with this far_max, or without one (0), before it is scaled. Minus infinity if far_max is
// infinity, whatever the score is: then the difference may be NaN, and the maximum of NaN and a number is the
// number. Otherwise no score that a mask keeps is NaN, as lse is finite.
FLASHJIT_FN float below_far_max(float score, float far_max) {
  return fmaxf(score - far_max, minus_infinity);
}
// The same for a fragment of 16 keys and `rows` rows. far_max: from the thread's first row on.
template <int rows>
FLASHJIT_FN void subtract_far_max(float* scores, const float* far_max) {
#pragma unroll
  for (int i = 0; i < rows / 8; ++i) {
    const float2 of_rows = *reinterpret_cast<const float2*>(far_max + i * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      scores[4 * i + j] = below_far_max(scores[4 * i + j], j % 2 ? of_rows.y : of_rows.x);
  }
}

}  // namespace flashjit::device
