// Merges the parts of one row (FlashDecoding, Dao et al. 2023). The weight of a part is its share of the sum
// of exponentials, computed from its log-sum-exp. A thread has 16 bytes of each part.
#pragma once

#include "cuda/ptx.cuh"

namespace flashjit::device {

// How parts are read: they stay as they are while the kernel runs, or the kernel before this one made them
// and may have ended after this one began.
struct LastingParts {
  FLASHJIT_FN static float load(const float* from) { return ld_global_nc(from); }
  FLASHJIT_FN static void load(u32 (&to)[4], const void* from) { ld_global_nc_v4(to, from); }
};
struct FreshParts {
  FLASHJIT_FN static float load(const float* from) { return ld_global_cg(from); }
  FLASHJIT_FN static void load(u32 (&to)[4], const void* from) { ld_global_cg_v4(to, from); }
};

// Memory bandwidth limits a merge, so the loads of `parts_at_once` parts are issued before the first is used.
// one_by_one: each part is added by itself, so that empty parts anywhere change no bit.
template <class Part, int parts_at_once, class Reader, bool one_by_one = false>
struct MergedRow {
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr int columns = 16 / sizeof(Part);

  float o[columns];  // normalised
  float lse;

  // Part i's columns are at o_of(i), its log-sum-exp at lse_of(i).
  template <class AddressOfO, class AddressOfLse>
  FLASHJIT_FN MergedRow(int parts, const AddressOfO& o_of, const AddressOfLse& lse_of) : o{} {
    float maximum = minus_infinity, sum = 0;
    for (int first = 0; first < parts; first += parts_at_once) {
      u32 values[parts_at_once][4];
      float part_lse[parts_at_once];
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        part_lse[i] = minus_infinity;
        if (first + i >= parts) continue;
        part_lse[i] = Reader::load(lse_of(first + i));
        Reader::load(values[i], o_of(first + i));
      }
      constexpr int together = one_by_one ? 1 : parts_at_once;
#pragma unroll
      for (int begin = 0; begin < parts_at_once; begin += together) {
        float top = maximum;
#pragma unroll
        for (int i = begin; i < begin + together; ++i) top = fmaxf(top, part_lse[i]);
        const float reference = top == minus_infinity ? 0 : top;  // -inf - -inf is NaN
        const float kept = ex2_approx((maximum - reference) * log2_e);
        maximum = top;
        sum *= kept;
#pragma unroll
        for (int c = 0; c < columns; ++c) o[c] *= kept;
#pragma unroll
        for (int i = begin; i < begin + together; ++i) {
          if (part_lse[i] == minus_infinity) continue;  // its o may hold anything
          const float weight = ex2_approx((part_lse[i] - reference) * log2_e);
          sum += weight;
#pragma unroll
          for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, element(values[i], c), o[c]);
        }
      }
    }
    const bool empty = sum == 0;
    const float inverse = empty ? 0.f : 1.f / sum;
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] *= inverse;
    lse = empty ? minus_infinity : maximum + lg2_approx(sum) * ln_2;
  }

  FLASHJIT_FN void store(float* to) const {
#pragma unroll
    for (int c = 0; c < columns; c += 4) {
      const u32 words[] = {__float_as_uint(o[c]), __float_as_uint(o[c + 1]), __float_as_uint(o[c + 2]),
                           __float_as_uint(o[c + 3])};
      st_global_v4(to + c, words);
    }
  }
  template <class Narrow>
  FLASHJIT_FN void store(Narrow* to) const {
    u32 words[columns / 2];
#pragma unroll
    for (int c = 0; c < columns; c += 2) words[c / 2] = cvt_rn_x2(Narrow{}, o[c], o[c + 1]);
    if constexpr (columns == 4)
      st_global_v2(to, words);
    else
      st_global_v4(to, words);
  }

 private:
  FLASHJIT_FN static float element(const u32 (&words)[4], int c) {
    if constexpr (sizeof(Part) == 4) {
      return __uint_as_float(words[c]);
    } else {
      return to_float(Part{static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16))});
    }
  }
};

}  // namespace flashjit::device
