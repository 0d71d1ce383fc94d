// Masks and online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022) in the accumulators of one warp.
//
// Scores come block by block. Each row keeps a reference r, its maximum times the scale, and the sum of its
// weights exp2(score * scale - r). A weight takes one multiply-add and one special function. The reference
// only keeps weights in range: it follows the maximum when that maximum has grown by more than a factor of
// 2^8, so most blocks rescale nothing.
//
// A fragment has 16 rows and n columns. Registers 4 i ... 4 i + 3 of a thread hold columns 8 i + 2 (lane % 4)
// and the next one: first of row lane / 4, then of row lane / 4 + 8.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/mask.h"

namespace flashjit::device {

// The first key of a part of a block.
template <int keys, int columns>
FLASHJIT_FN int first_key_of(const Block& block, int part) {
  return columns == keys ? block.index * keys : block.index * keys + part * columns;
}

// Sets the scores of a block that the mask excludes to minus infinity. rows(0) and rows(8) are the positions
// of the thread's two rows. The walk was across `tile_rows` rows, in blocks of `keys`; the scores are those
// of the block's `part` of so many columns.
template <int tile_rows, int keys, int columns = keys, class Mask, class Positions>
FLASHJIT_FN void mask_scores(float* scores, const Mask& mask, const Positions& rows, const Block& block,
                             int lane, int part = 0) {
  const int first_key = first_key_of<keys, columns>(block, part), base = first_key + lane % 4 * 2;
  if constexpr (Mask::row_intervals) {
    // This thread's columns of a row are 0, 1, 8, 9, 16, ... from `base`. before(limit) counts the columns
    // before `limit`. A row keeps the n-th of them if before(begin) <= n < before(end) for the row's
    // interval.
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
    typename Mask::Tile tile = mask.template tile<tile_rows, keys>(block.found);
    constexpr int asked = round_up(columns, 16);  // of 8 columns' neighbours, too
    static_assert(asked == columns || columns == 8);
    const int before = asked == columns ? 0 : first_key % asked;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      u32 words[words_of<asked>];
      tile.template bits<asked>(rows(8 * r), first_key - before, words);
#pragma unroll
      for (u32& word : words) word >>= before + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!(words[i / 4] >> (8 * (i % 4) + c) & 1)) scores[4 * i + 2 * r + c] = minus_infinity;
    }
  }
}

// The same where heads(0) and heads(8) are the query heads of the rows. formula.cuh has it for formulas.
template <int tile_rows, int keys, int columns = keys, class Mask, class Positions, class Heads>
FLASHJIT_FN void mask_elements(float* scores, const Mask& mask, const Positions& rows, const Heads&,
                               const Block& block, int lane, int part = 0) {
  mask_scores<tile_rows, keys, columns>(scores, mask, rows, block, lane, part);
}

// How a block's scores become exponents of 2: times the scale of all scores.
struct Unshifted {
  static constexpr bool by_thread = false;
  FLASHJIT_FN static float relative(int, float score, float scale, float reference) {
    return __fmaf_rn(score, scale, -reference);
  }
};
// Or times a scale of the block, and with a shift of the thread's columns of each row.
struct Shifted {
  static constexpr bool by_thread = true;
  float scale, shift[2];
  FLASHJIT_FN float exponent(int r, float score) const { return __fmaf_rn(score, scale, shift[r]); }
  FLASHJIT_FN float relative(int r, float score, float, float reference) const {
    return __fmaf_rn(score, scale, shift[r] - reference);
  }
};

// The running state of a thread's rows, two of every fragment. at_once: take_max() raises a reference as soon
// as it has the row's maximum, not after the vote. Measured: at_once makes mma.sync 2% faster and wgmma 4%
// slower. alone: no other row of the warp has a say in a row's reference.
template <int fragments, bool at_once, bool alone = false>
class OnlineSoftmax {
  static constexpr int rows = 2 * fragments;
  static constexpr float tolerance = 8;  // log2
  // The rounding of a larger reference may take weights out of fp16's range.
  static constexpr float farthest = 1 << 26;
  // Lower references become this one. Their weights, which near keys of later blocks or of other parts of the
  // row outweigh wholly, stay finite.
  static constexpr float least = -2 * farthest;

 public:
  // The reference of a row without keys: finite, so that exp2(-inf - reference) is 0 and not NaN.
  static constexpr float lowest = -3.402823466e38f;

  FLASHJIT_FN explicit OnlineSoftmax(float scale_log2) : scale_log2_(scale_log2) {}

  FLASHJIT_FN void reset() {
#pragma unroll
    for (int r = 0; r < rows; ++r) reference_[r] = lowest, row_sum_[r] = 0;
  }

  // Raises the references if the maximum of any row of the warp has grown by more than `tolerance`. Returns
  // true if outputs must be multiplied by correction(). scores: `registers` of each fragment.
  template <int registers, class Exponents = Unshifted>
  FLASHJIT_FN bool take_max(const float* scores, const Exponents& exponents = {}) {
    float top[rows];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float m = maximum<registers>(scores, r, exponents);
      if constexpr (at_once) {
        grows |= follow(r, m);
      } else {
        top[r] = fmaxf(reference_[r], m);
        grows |= top[r] - reference_[r] > tolerance;
      }
    }
    if (!__any_sync(0xffffffff, grows)) return false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      if constexpr (!at_once)
        raise(r, alone && !(top[r] - reference_[r] > tolerance) ? reference_[r] : top[r]);
      row_sum_[r] *= correction_[r];
    }
    return true;
  }
  // The same where other warps have other keys of the rows. combine(maxima) takes theirs into account.
  template <int registers, class Combine>
  FLASHJIT_FN bool take_max_of_all(const float* scores, const Combine& combine) {
    static_assert(at_once);
    float top[rows];
    bool grows = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) top[r] = maximum<registers>(scores, r, Unshifted{});
    combine(top);
#pragma unroll
    for (int r = 0; r < rows; ++r) grows |= follow(r, top[r]);
    if (!__any_sync(0xffffffff, grows)) return false;
#pragma unroll
    for (int r = 0; r < rows; ++r) row_sum_[r] *= correction_[r];
    return true;
  }

  // Instead of take_max() for a block whose scores are all so near to 0 that their weights stay in range
  // relative to 0 and to any larger reference: raises lower references to 0. Returns the same.
  FLASHJIT_FN bool take_near_zero() {
    bool grows = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) grows |= reference_[r] < 0;
    if (!__any_sync(0xffffffff, grows)) return false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      raise(r, fmaxf(reference_[r], 0.f));
      row_sum_[r] *= correction_[r];
    }
    return true;
  }

  // Turns scores into weights relative to the references and adds the weights up.
  template <int registers, class Exponents = Unshifted>
  FLASHJIT_FN void exponentiate(float* scores, const Exponents& exponents = {}) {
#pragma unroll
    for (int r = 0; r < rows; ++r) row_sum_[r] += weigh_row<registers>(r, scores, exponents);
  }
  // The same before a block's maxima are known, so that weights may leave their range. sums: of this thread's
  // weights in each row, for add() once they are in range.
  template <int registers>
  FLASHJIT_FN void weigh(float* scores, float (&sums)[rows]) const {
#pragma unroll
    for (int r = 0; r < rows; ++r) sums[r] = weigh_row<registers>(r, scores, Unshifted{});
  }
  // Whether weights of that type with these sums are in range; false for NaN.
  template <class Weight>
  FLASHJIT_FN static bool in_range(const float (&sums)[rows]) {
    bool all = true;
#pragma unroll
    for (int r = 0; r < rows; ++r) all &= sums[r] <= largest_sum(Weight{});
    return all;
  }
  FLASHJIT_FN void add(const float (&sums)[rows]) {
#pragma unroll
    for (int r = 0; r < rows; ++r) row_sum_[r] += sums[r];
  }
  // Whether any row of the warp has had no keys so far.
  FLASHJIT_FN bool any_without_keys() const {
    bool any = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) any |= reference_[r] == lowest;
    return __any_sync(0xffffffff, any);
  }
  // The same for two scores of row r, for calls between other work.
  FLASHJIT_FN void exponentiate(int r, float& a, float& b) {
    a = weight(r, a);
    b = weight(r, b);
    row_sum_[r] += a + b;
  }

  FLASHJIT_FN float correction(int r) const { return correction_[r]; }

  // After the last block: a row's sum of weights relative to its reference. 0 for a row without keys.
  FLASHJIT_FN float relative_sum(int r) const {
    float sum = row_sum_[r];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    return sum;
  }
  // `lowest` for a row without keys.
  FLASHJIT_FN float reference(int r) const { return reference_[r]; }
  // Sets a row's sum and reference; minus infinity without keys.
  FLASHJIT_FN void set(int r, float reference, float sum, int lane) {
    reference_[r] = fmaxf(reference, lowest);
    row_sum_[r] = lane % 4 == 0 ? sum : 0;
  }
  // The state of a thread's rows, for the thread that goes on with them. take() returns as take_max() does.
  FLASHJIT_FN void give(u32 (&state)[2 * rows]) const {
#pragma unroll
    for (int r = 0; r < rows; ++r)
      state[r] = __float_as_uint(reference_[r]), state[rows + r] = __float_as_uint(row_sum_[r]);
  }
  FLASHJIT_FN bool take(const u32 (&state)[2 * rows]) {
    bool differs = false;
#pragma unroll
    for (int r = 0; r < rows; ++r) {
      const float reference = __uint_as_float(state[r]);
      differs |= reference != reference_[r];
      correction_[r] = ex2_approx(reference_[r] - reference);
      reference_[r] = reference;
      row_sum_[r] = __uint_as_float(state[rows + r]);
    }
    return __any_sync(0xffffffff, differs);
  }

  // The sum over all keys of a row: NaN if the reference is too far from 0.
  FLASHJIT_FN static float checked(float sum, float reference) {
    return fabsf(reference) > farthest && reference > lowest ? not_a_number : sum;
  }
  FLASHJIT_FN float sum(int r) const { return checked(relative_sum(r), reference_[r]); }
  // Minus infinity for a row without keys.
  FLASHJIT_FN static float log_sum_exp(float sum, float reference) {
    return sum == 0 ? minus_infinity : (reference + lg2_approx(sum)) * ln_2;
  }
  FLASHJIT_FN float sum(int r, float& lse) const {
    const float sum = this->sum(r);
    lse = log_sum_exp(sum, reference_[r]);
    return sum;
  }
  // The factor that normalises the output of row r.
  FLASHJIT_FN float normalizer(int r, float& lse) const {
    const float sum = this->sum(r, lse);
    return sum == 0 ? 0.f : 1.f / sum;
  }
  // The same if the row's sum begins with 2^sink.
  FLASHJIT_FN float normalizer(int r, float& lse, float sink) const {
    return normalizer(this->sum(r), reference_[r], sink, lse);
  }
  FLASHJIT_FN static float normalizer(float sum, float reference, float sink, float& lse) {
    const float top = fmaxf(reference, sink), kept = ex2_approx(reference - top);
    const float all = __fmaf_rn(sum, kept, ex2_approx(sink - top));
    lse = log_sum_exp(all, top);
    return sum == 0 ? 0.f : kept / all;
  }

 private:
  // fp16 has no numbers beyond 2^16. Weights in bf16 leave room for values and for the sums of all keys.
  static constexpr FLASHJIT_FN float largest_sum(fp16) { return 0x1p15f; }
  static constexpr FLASHJIT_FN float largest_sum(bf16) { return 0x1p64f; }
  // The largest exponent of row r's scores.
  template <int registers, class Exponents>
  FLASHJIT_FN float maximum(const float* scores, int r, const Exponents& exponents) const {
    const float* const s = scores + r / 2 * registers + r % 2 * 2;
    float even = s[0], odd = s[1];
#pragma unroll
    for (int i = 1; i < registers / 4; ++i) {
      even = fmaxf(even, s[4 * i]);
      odd = fmaxf(odd, s[4 * i + 1]);
    }
    float m = fmaxf(even, odd);
    if constexpr (Exponents::by_thread) m = exponents.exponent(r, m);
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
    if constexpr (!Exponents::by_thread) m = __fmul_rn(m, scale_log2_);  // rounded as the reference will be
    return m;
  }
  // at_once: raises the reference, and says whether it did.
  FLASHJIT_FN bool follow(int r, float m) {
    const float growth = m - reference_[r];
    const bool grew = growth > tolerance;
    correction_[r] = grew ? ex2_approx(-growth) : 1.f;
    if (grew) reference_[r] = fmaxf(m, least);
    return grew;
  }
  FLASHJIT_FN void raise(int r, float to) {
    if (to > lowest) to = fmaxf(to, least);
    correction_[r] = ex2_approx(reference_[r] - to);
    reference_[r] = to;
  }
  template <int registers, class Exponents>
  FLASHJIT_FN float weigh_row(int r, float* scores, const Exponents& exponents) const {
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < registers / 4; ++i) {
      float* const s = scores + r / 2 * registers + r % 2 * 2 + 4 * i;
      even += s[0] = weight(r, s[0], exponents);
      odd += s[1] = weight(r, s[1], exponents);
    }
    return even + odd;
  }
  template <class Exponents = Unshifted>
  FLASHJIT_FN float weight(int r, float score, const Exponents& exponents = {}) const {
    return ex2_approx(exponents.relative(r, score, scale_log2_, reference_[r]));
  }

  float scale_log2_;
  float reference_[rows];
  float row_sum_[rows];  // of this thread's columns
  float correction_[rows];
};

}  // namespace flashjit::device
