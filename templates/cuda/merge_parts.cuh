// Merges the parts of one row (FlashDecoding, Dao et al. 2023). The weight of a part is its share of the sum
// of exponentials. A thread has 16 bytes of each part.
#pragma once

#include "cuda/store_columns.cuh"

namespace flashjit::device {

// A part's exponentials: their sum relative to exp(maximum), where the part's output is. Minus infinity: the
// part has no keys.
struct PartState {
  float maximum, sum;
};
// That of a softmax's row. A row of far scores alone may have a sum of 0, and a row of NaN alone the lowest
// reference.
template <class Softmax>
FLASHJIT_FN PartState part_state(float reference, float sum) {
  const bool has_keys = reference > Softmax::lowest || sum != 0;
  return {has_keys ? reference : minus_infinity, sum};
}

// Parts that a caller gives: normalised, with a log-sum-exp, which is the maximum of a sum of 1. They stay as
// they are while the kernel runs.
struct GivenParts {
  FLASHJIT_FN static PartState load(const float* lse) { return {ld_global_nc(lse), 1}; }
  FLASHJIT_FN static void load(u32 (&to)[4], const void* from) { ld_global_nc_v4(to, from); }
  FLASHJIT_FN static float weight(float difference) { return ex2_approx(difference * 1.4426950408889634f); }
  FLASHJIT_FN static float log_sum_exp(const PartState& all) {
    return all.maximum + lg2_approx(all.sum) * ln_2;
  }
};
// Parts of a decode or of sm_90a's forward: sums, with maximum (in log2) and sum apart. The kernel before
// this one made them and may have ended after this one began.
struct FreshParts {
  FLASHJIT_FN static PartState load(const float* state) {
    u32 words[2];
    ld_global_cg_v2(words, state);
    return {__uint_as_float(words[0]), __uint_as_float(words[1])};
  }
  FLASHJIT_FN static void load(u32 (&to)[4], const void* from) { ld_global_cg_v4(to, from); }
  FLASHJIT_FN static float weight(float difference) { return ex2_approx(difference); }
  FLASHJIT_FN static float log_sum_exp(const PartState& all) {
    return (all.maximum + lg2_approx(all.sum)) * ln_2;
  }
};

// A thread's part of a row: `columns` columns. Memory limits a merge, so the loads of `parts_at_once` parts
// are issued before the first is used. one_by_one: each is then added by itself, so that an empty part
// changes no bit of the result.
template <class Part, int parts_at_once, class Parts, bool one_by_one = parts_at_once == 1>
struct MergedRow {
  static constexpr int columns = 16 / sizeof(Part);

  float o[columns] = {};  // relative to `maximum`, until normalize()
  float maximum = minus_infinity, sum = 0;

  // Adds parts first, first + step, ... before `end`. Part i's columns are at o_of(i), its state at
  // state_of(i).
  template <class AddressOfO, class AddressOfState>
  FLASHJIT_FN void add_parts(int first, int end, int step, const AddressOfO& o_of,
                             const AddressOfState& state_of) {
    for (; first < end; first += parts_at_once * step) add_some(first, end, step, o_of, state_of);
  }
  // The same for the first parts_at_once of them.
  template <class AddressOfO, class AddressOfState>
  FLASHJIT_FN void add_some(int first, int end, int step, const AddressOfO& o_of,
                            const AddressOfState& state_of) {
    u32 values[parts_at_once][4];
    PartState state[parts_at_once];
#pragma unroll
    for (int i = 0; i < parts_at_once; ++i) {
      state[i] = {minus_infinity, 0};
      const int part = first + i * step;
      if (part >= end) continue;
      state[i] = Parts::load(state_of(part));
      Parts::load(values[i], o_of(part));
    }
    float top = maximum;
    if constexpr (!one_by_one) {
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) top = fmaxf(top, state[i].maximum);
      raise(top);
    }
#pragma unroll
    for (int i = 0; i < parts_at_once; ++i) {
      if (state[i].maximum == minus_infinity) continue;  // its o may hold anything
      if constexpr (one_by_one) raise(top = fmaxf(top, state[i].maximum));
      const float weight = Parts::weight(state[i].maximum - finite(top));
      sum = __fmaf_rn(weight, state[i].sum, sum);
#pragma unroll
      for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, element(values[i], c), o[c]);
    }
  }

  // Adds what another thread has made of other parts of the row.
  FLASHJIT_FN void add(const MergedRow& other) {
    if (other.maximum == minus_infinity) {  // no part, or NaN
      sum += other.sum;
      return;
    }
    raise(fmaxf(maximum, other.maximum));
    const float weight = Parts::weight(other.maximum - maximum);
    sum = __fmaf_rn(weight, other.sum, sum);
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, other.o[c], o[c]);
  }

  // Adds a key whose value is 0. logit: in the unit of maxima.
  FLASHJIT_FN void add_logit(float logit) {
    const float top = fmaxf(maximum, logit);
    raise(top);
    sum += Parts::weight(logit - finite(top));
  }

  // After the last part. Returns the log-sum-exp.
  FLASHJIT_FN float normalize() {
    const bool empty = sum == 0;
    const float inverse = empty ? 0.f : 1.f / sum;
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] *= inverse;
    return empty ? minus_infinity : Parts::log_sum_exp({maximum, sum});
  }

 private:
  FLASHJIT_FN static float finite(float top) {
    return top == minus_infinity ? 0 : top;
  }  // -inf - -inf is NaN
  FLASHJIT_FN void raise(float top) {
    const float kept = Parts::weight(maximum - finite(top));
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

// Rows of four columns in shared memory, for teams of threads that share the parts of a row: 24 bytes for
// each thread.
template <class Row, int threads>
struct SharedRows {
  u32 start;

  FLASHJIT_FN void give(const Row& row) const {
    st_shared_v4(start + tid_x() * 16, __float_as_uint(row.o[0]), __float_as_uint(row.o[1]),
                 __float_as_uint(row.o[2]), __float_as_uint(row.o[3]));
    st_shared_v2(start + threads * 16 + tid_x() * 8, __float_as_uint(row.maximum), __float_as_uint(row.sum));
  }
  FLASHJIT_FN Row take(u32 thread) const {
    u32 o[4];
    int state[2];
    ld_shared_v4(o, start + thread * 16);
    ld_shared_v2(state[0], state[1], start + threads * 16 + thread * 8);
    Row row;
#pragma unroll
    for (int c = 0; c < 4; ++c) row.o[c] = __uint_as_float(o[c]);
    row.maximum = __uint_as_float(static_cast<u32>(state[0]));
    row.sum = __uint_as_float(static_cast<u32>(state[1]));
    return row;
  }
};

}  // namespace flashjit::device
