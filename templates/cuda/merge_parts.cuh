// Merges the parts of one row (FlashDecoding, Dao et al. 2023). The weight of a part is its share of the sum
// of exponentials, computed from its log-sum-exp. A thread has 16 bytes of each part.
#pragma once

#include "cuda/store_columns.cuh"

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

// A thread's part of a row: `columns` columns. Memory limits a merge, so the loads of `parts_at_once` parts
// are issued before the first is used. With parts_at_once 1 an empty part changes no bit of the result.
template <class Part, int parts_at_once, class Reader>
struct MergedRow {
  static constexpr int columns = 16 / sizeof(Part);

  float o[columns] = {};  // relative to `maximum`, until normalize()
  float maximum = minus_infinity, sum = 0;

  // Adds parts first, first + step, ... before `end`. Part i's columns are at o_of(i), its log-sum-exp at
  // lse_of(i).
  template <class AddressOfO, class AddressOfLse>
  FLASHJIT_FN void add_parts(int first, int end, int step, const AddressOfO& o_of,
                             const AddressOfLse& lse_of) {
    for (; first < end; first += parts_at_once * step) {
      u32 values[parts_at_once][4];
      float part_lse[parts_at_once];
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        part_lse[i] = minus_infinity;
        const int part = first + i * step;
        if (part >= end) continue;
        part_lse[i] = Reader::load(lse_of(part));
        Reader::load(values[i], o_of(part));
      }
      float top = maximum;
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) top = fmaxf(top, part_lse[i]);
      raise(top);
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        if (part_lse[i] == minus_infinity) continue;  // its o may hold anything
        const float weight = ex2_approx((part_lse[i] - finite(top)) * log2_e);
        sum += weight;
#pragma unroll
        for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, element(values[i], c), o[c]);
      }
    }
  }

  // Adds what another thread has made of other parts of the row.
  FLASHJIT_FN void add(const MergedRow& other) {
    if (other.maximum == minus_infinity) {  // no part, or NaN
      sum += other.sum;
      return;
    }
    raise(fmaxf(maximum, other.maximum));
    const float weight = ex2_approx((other.maximum - maximum) * log2_e);
    sum = __fmaf_rn(weight, other.sum, sum);
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, other.o[c], o[c]);
  }

  // Adds a part whose output is 0.
  FLASHJIT_FN void add_logit(float lse) {
    const float top = fmaxf(maximum, lse);
    raise(top);
    sum += ex2_approx((lse - finite(top)) * log2_e);
  }

  // After the last part. Returns the log-sum-exp.
  FLASHJIT_FN float normalize() {
    const bool empty = sum == 0;
    const float inverse = empty ? 0.f : 1.f / sum;
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] *= inverse;
    return empty ? minus_infinity : maximum + lg2_approx(sum) * ln_2;
  }

 private:
  static constexpr float log2_e = 1.4426950408889634f;

  FLASHJIT_FN static float finite(float top) {
    return top == minus_infinity ? 0 : top;
  }  // -inf - -inf is NaN
  FLASHJIT_FN void raise(float top) {
    const float kept = ex2_approx((maximum - finite(top)) * log2_e);
    maximum = top;
    sum *= kept;
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] *= kept;
  }
  FLASHJIT_FN static float element(const u32 (&words)[4], int c) {
    if constexpr (sizeof(Part) == 4) {
      return __uint_as_float(words[c]);
    } else {
      return to_float(Part{static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16))});
    }
  }
};

}  // namespace flashjit::device
