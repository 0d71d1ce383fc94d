// Merges partial results of attention, each over a part of the keys, into one, or adds partial gradients.
#pragma once

#include "cuda/merge_parts.cuh"
#include "shared/merge_params.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct MergeCudaSpec {
  using parts_dtype = fp32;
  static constexpr bool lse = true, sum = false;
};

// Parts that are added as they are: each has weight 1. The output may lie where the first part does, so their
// loads are no promise that nothing writes there.
struct AddedParts {
  FLASHJIT_FN static PartState load(const float*) { return {0, 1}; }
  FLASHJIT_FN static void load(u32 (&to)[4], const void* from) { ld_global_cg_v4(to, from); }
  FLASHJIT_FN static float weight(float) { return 1; }
};

template <class Spec, class Config>
struct Merge {
  using Element = typename Spec::Element;
  using Part = typename Spec::parts_dtype;
  using Row = MergedRow<Part, Config::num_stages, typename Choose<Spec::sum, AddedParts, GivenParts>::type>;

  static constexpr int row_threads = Spec::head_dim_v / Row::columns;

  FLASHJIT_FN static void run(const CudaMergeParams& p) {
    const u32 row = tid_x() / row_threads, column = tid_x() % row_threads * Row::columns;
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
    Row merged;
    merged.add_parts(
        0, p.parts, 1, [&](int i) { return parts_o + i * p.parts_o_stride; },
        [&](int i) { return parts_lse + i * p.parts_lse_stride; });
    float lse = 0;
    if constexpr (!Spec::sum) lse = merged.normalize();
    store_columns(static_cast<Element*>(p.o.data) + p.o.offset(batch, position, head) + column, merged.o);
    if (Spec::lse && column == 0) static_cast<float*>(p.lse.data)[p.lse.offset(batch, position, head)] = lse;
  }
};

template <class Spec, class Config>
FLASHJIT_FN void merge(const CudaMergeParams& params) {
  Merge<Spec, Config>::run(params);
}

}  // namespace flashjit::device
