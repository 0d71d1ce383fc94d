// Softmax over blocks of scores as they come (Milakov and Gimelshein, 2018), in the accumulators of one warp.
//
// A fragment of 16 rows by n columns: registers 4 i ... 4 i + 3 of a thread hold columns 8 i + 2 (lane % 4) +
// {0, 1} of row lane / 4, then of row lane / 4 + 8.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/mask.h"

namespace flashjit::device {

// Puts minus infinity where the mask keeps nothing of a block of scores. rows(0) and rows(8) are the
// positions of the thread's two; the walk was across tiles of `tile_rows`.
template <int tile_rows, class Mask, class Positions, int registers>
FLASHJIT_FN void mask_scores(float (&scores)[registers], const Mask& mask, const Positions& rows,
                             const Block& block, int lane) {
  constexpr int columns = registers * 2;
  const int first_key = block.index * columns, base = first_key + lane % 4 * 2;
  if constexpr (Mask::row_intervals) {
    // This thread's columns of a row are 0, 1, 8, 9, 16, ... from `base`: the n-th is kept if it lies between
    // how many come before the interval's begin and before its end.
    const auto before = [&](int limit) {
      const int n = min(max(limit - base, 0), columns);
      return n / 8 * 2 + min(n % 8, 2);
    };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Span kept = mask.hull(Keys{}, {rows(8 * r), rows(8 * r) + 1});
      const int begin = before(kept.begin), end = before(kept.end);
#pragma unroll
      for (int word = 0; word < ceil_div(columns, 128); ++word) {
        const u32 bits = low_bits(end - 32 * word) & ~low_bits(begin - 32 * word);
#pragma unroll
        for (int i = 16 * word; i < min(16 * word + 16, columns / 8); ++i)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            if (!(bits & 1u << (2 * i + c) % 32)) scores[4 * i + 2 * r + c] = minus_infinity;
      }
    }
  } else {
    typename Mask::Tile tile = mask.template tile<tile_rows, columns>(block.found);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 words[words_of<columns>];
      tile.template bits<columns>(rows(8 * r), first_key, words);
#pragma unroll
      for (u32& word : words) word >>= lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!(words[i / 4] >> (8 * (i % 4) + c) & 1)) scores[4 * i + 2 * r + c] = minus_infinity;
    }
  }
}

// A row's sum of weights, which are relative to its maximum (scaled, rounded); NaN where that rounding may
// have taken them out of fp16. `empty`: the row has no maximum.
FLASHJIT_FN float checked_sum(float sum, float maximum, bool empty) {
  constexpr float largest = 1 << 26;
  return empty || fabsf(maximum) <= largest ? sum : not_a_number;
}

// The running state of a thread's two rows.
class OnlineSoftmax {
 public:
  FLASHJIT_FN explicit OnlineSoftmax(float scale_log2) : scale_log2_(scale_log2) {}

  FLASHJIT_FN void reset() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max_[r] = minus_infinity, row_sum_[r] = 0;
  }

  // Raises the reference maximum where these scores ask for it. True: what was summed so far is to be
  // multiplied by correction(). The maximum only keeps exponentials in range, so that while no row of the
  // warp grows by more than a factor of 2^8 the old one serves.
  template <int registers>
  FLASHJIT_FN bool take_max(const float (&scores)[registers]) {
    constexpr float tolerance = 8;  // log2
    float top[2];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float even = scores[2 * r], odd = scores[2 * r + 1];
#pragma unroll
      for (int i = 1; i < registers / 4; ++i) {
        even = fmaxf(even, scores[4 * i + 2 * r]);
        odd = fmaxf(odd, scores[4 * i + 2 * r + 1]);
      }
      float m = fmaxf(even, odd);
      m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
      top[r] = fmaxf(row_max_[r], m);
      grows |= (top[r] - row_max_[r]) * scale_log2_ > tolerance;
    }
    if (!__any_sync(0xffffffff, grows)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      correction_[r] = top[r] == minus_infinity ? 1.f : ex2_approx((row_max_[r] - top[r]) * scale_log2_);
      row_max_[r] = top[r];
      row_sum_[r] *= correction_[r];
    }
    return true;
  }

  // Scores to weights relative to the reference maximum, and their sum.
  template <int registers>
  FLASHJIT_FN void exponentiate(float (&scores)[registers]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // A row that had no key yet: exp2(-inf - 0), not of -inf - -inf.
      const float offset = row_max_[r] == minus_infinity ? 0.f : row_max_[r] * scale_log2_;
      float even = 0, odd = 0;
#pragma unroll
      for (int i = 0; i < registers / 4; ++i) {
        float* const s = scores + 4 * i + 2 * r;
        even += s[0] = ex2_approx(__fmaf_rn(s[0], scale_log2_, -offset));
        odd += s[1] = ex2_approx(__fmaf_rn(s[1], scale_log2_, -offset));
      }
      row_sum_[r] += even + odd;
    }
  }

  FLASHJIT_FN float correction(int r) const { return correction_[r]; }

  // After the last block: the factor that makes an output of row r, and its log-sum-exp. A row that had no
  // key gets 0 and minus infinity, one whose maximum is too far from 0 NaN.
  FLASHJIT_FN float normalizer(int r, float& lse) const {
    float sum = row_sum_[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    sum = checked_sum(sum, row_max_[r] * scale_log2_, row_max_[r] == minus_infinity);
    const bool empty = sum == 0;
    // An explicit fma: dropout of 0 has the bits of none.
    lse = empty ? minus_infinity : __fmaf_rn(row_max_[r], scale_log2_, lg2_approx(sum)) * ln_2;
    return empty ? 0.f : 1.f / sum;
  }

 private:
  float scale_log2_;
  float row_max_[2];  // of raw scores
  float row_sum_[2];  // over this thread's columns
  float correction_[2];
};

}  // namespace flashjit::device
