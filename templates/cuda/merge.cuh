// Merges partial results of attention, each over a part of the keys, into one (FlashDecoding, Dao et al.
// 2023). The weight of a part is its share of the sum of exponentials, computed from its log-sum-exp. Memory
// bandwidth limits a merge, so all loads of several parts are issued before the first is used.
#pragma once

#include "cuda/ptx.cuh"
#include "shared/merge_params.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct MergeCudaSpec {
  using parts_dtype = fp32;
  static constexpr bool lse = true;
};

template <class Spec, class Config>
struct Merge {
  using Element = typename Spec::Element;
  using Part = typename Spec::parts_dtype;

  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr int columns = 16 / sizeof(Part);  // of a thread: one load for each part
  static constexpr int parts_at_once = Config::num_stages;
  static constexpr int row_threads = Spec::head_dim_v / columns;

  FLASHJIT_FN static void run(const CudaMergeParams& p) {
    const u32 row = tid_x() / row_threads, column = tid_x() % row_threads * columns;
    const u32 row_position = row * p.heads_inverse >> 16, row_head = row - row_position * p.block_heads;
    const i64 position = i64{ctaid_x()} * p.block_positions + row_position;
    if (row_position >= p.block_positions || position >= p.seqlen) return;
    for (u32 batch = ctaid_z(); batch < p.batch; batch += nctaid_z())
      for (u32 head = ctaid_y() * p.block_heads + row_head; head < p.heads;
           head += nctaid_y() * p.block_heads)
        merge_row(p, batch, position, head, column);
  }

 private:
  FLASHJIT_FN static void merge_row(const CudaMergeParams& p, u32 batch, i64 position, u32 head, u32 column) {
    const Part* const parts_o =
        static_cast<const Part*>(p.parts_o.data) + p.parts_o.offset(batch, position, head) + column;
    const float* const parts_lse =
        static_cast<const float*>(p.parts_lse.data) + p.parts_lse.offset(batch, position, head);
    float maximum = minus_infinity, sum = 0, o[columns] = {};
    for (int first = 0; first < p.parts; first += parts_at_once) {
      u32 values[parts_at_once][4];
      float lse[parts_at_once];
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        lse[i] = minus_infinity;
        if (first + i >= p.parts) continue;
        lse[i] = ld_global_nc(parts_lse + (first + i) * p.parts_lse_stride);
        ld_global_nc_v4(values[i], parts_o + (first + i) * p.parts_o_stride);
      }
      float top = maximum;
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) top = fmaxf(top, lse[i]);
      const float reference = top == minus_infinity ? 0 : top;  // -inf - -inf is NaN
      const float kept = ex2_approx((maximum - reference) * log2_e);
      maximum = top;
      sum *= kept;
#pragma unroll
      for (int c = 0; c < columns; ++c) o[c] *= kept;
#pragma unroll
      for (int i = 0; i < parts_at_once; ++i) {
        if (lse[i] == minus_infinity) continue;  // its o may hold anything
        const float weight = ex2_approx((lse[i] - reference) * log2_e);
        sum += weight;
#pragma unroll
        for (int c = 0; c < columns; ++c) o[c] = __fmaf_rn(weight, element(values[i], c), o[c]);
      }
    }
    const bool empty = sum == 0;
    const float inverse = empty ? 0.f : 1.f / sum;
#pragma unroll
    for (int c = 0; c < columns; ++c) o[c] *= inverse;
    store(static_cast<Element*>(p.o.data) + p.o.offset(batch, position, head) + column, o);
    if (Spec::lse && column == 0)
      static_cast<float*>(p.lse.data)[p.lse.offset(batch, position, head)] =
          empty ? minus_infinity : maximum + lg2_approx(sum) * ln_2;
  }

  FLASHJIT_FN static float element(const u32 (&words)[4], int c) {
    if constexpr (sizeof(Part) == 4) {
      return __uint_as_float(words[c]);
    } else {
      return to_float(Part{static_cast<unsigned short>(words[c / 2] >> (c % 2 * 16))});
    }
  }
  FLASHJIT_FN static void store(float* to, const float (&o)[columns]) {
#pragma unroll
    for (int c = 0; c < columns; c += 4) {
      const u32 words[] = {__float_as_uint(o[c]), __float_as_uint(o[c + 1]), __float_as_uint(o[c + 2]),
                           __float_as_uint(o[c + 3])};
      st_global_v4(to + c, words);
    }
  }
  template <class Narrow>
  FLASHJIT_FN static void store(Narrow* to, const float (&o)[columns]) {
    u32 words[columns / 2];
#pragma unroll
    for (int c = 0; c < columns; c += 2) words[c / 2] = cvt_rn_x2(Narrow{}, o[c], o[c + 1]);
    if constexpr (columns == 4)
      st_global_v2(to, words);
    else
      st_global_v4(to, words);
  }
};

template <class Spec, class Config>
FLASHJIT_FN void merge(const CudaMergeParams& params) {
  Merge<Spec, Config>::run(params);
}

}  // namespace flashjit::device
