// Merges partial results of attention, each over a part of the keys, into one, or adds partial gradients, on
// a CPU. cuda/merge.cuh says more.
#pragma once

#include "cpu/vector.h"
#include "shared/merge_params.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct MergeCpuSpec {
  using parts_dtype = fp32;
  static constexpr bool lse = true, sum = false;
};

template <class Spec>
struct Merge {
  using Element = typename Spec::Element;
  using Part = typename Spec::parts_dtype;
  static constexpr float log2_e = 1.4426950408889634f;
  static constexpr int head_dim = Spec::head_dim_v, vector = 8;

  const MergeParams& p;

  FLASHJIT_FN explicit Merge(const MergeParams& params) : p(params) {}
  FLASHJIT_FN void run(int batch, int position, int head) const {
    const Part* const parts_o =
        static_cast<const Part*>(p.parts_o.data) + p.parts_o.offset(batch, position, head);
    Element* const to = static_cast<Element*>(p.o.data) + p.o.offset(batch, position, head);
    if constexpr (Spec::sum) return add_parts(parts_o, to);
    const float* const parts_lse =
        static_cast<const float*>(p.parts_lse.data) + p.parts_lse.offset(batch, position, head);
    float maximum = minus_infinity;
    for (int i = 0; i < p.parts; ++i)
      if (const float lse = parts_lse[i * p.parts_lse_stride]; lse > maximum) maximum = lse;
    float sum = 0;
    Vec8 o[head_dim / vector] = {};
    for (int i = 0; i < p.parts; ++i) {
      const float lse = parts_lse[i * p.parts_lse_stride];
      if (lse == minus_infinity) continue;  // its o may hold anything
      const float weight = exp2(splat((lse - maximum) * log2_e))[0];
      sum += weight;
      const Part* const part = parts_o + i * p.parts_o_stride;
#pragma unroll
      for (int c = 0; c < head_dim / vector; ++c)
        o[c] = __builtin_elementwise_fma(load8(part + c * vector), Vec8{} + weight, o[c]);
    }
    const bool empty = sum == 0;
    const float inverse = empty ? 0.0f : 1 / sum;
#pragma unroll
    for (int c = 0; c < head_dim / vector; ++c) store8(to + c * vector, o[c] * inverse);
    if constexpr (Spec::lse)
      static_cast<float*>(p.lse.data)[p.lse.offset(batch, position, head)] =
          empty ? minus_infinity : maximum + log(splat(sum))[0];
  }

 private:
  // The output may lie where the first part does: a column is read before it is written.
  FLASHJIT_FN void add_parts(const Part* parts, Element* to) const {
    for (int c = 0; c < head_dim; c += vector) {
      Vec8 sum = {};
      for (int i = 0; i < p.parts; ++i) sum += load8(parts + i * p.parts_o_stride + c);
      store8(to + c, sum);
    }
  }
};

// Merges items [begin, end) of batch * seqlen. An item is all heads of a position.
template <class Spec>
FLASHJIT_FN void merge(const MergeParams& params, i64 begin, i64 end) {
  const DenormalsAreZeros mode;
  const Merge<Spec> rows(params);
  for (i64 item = begin; item < end; ++item)
    for (u32 head = 0; head < params.heads; ++head)
      rows.run(static_cast<int>(item / params.seqlen), static_cast<int>(item % params.seqlen),
               static_cast<int>(head));
}

}  // namespace flashjit::device
