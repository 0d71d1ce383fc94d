// Parts of a tile's keys in sm_90a's forward, for launches with fewer tiles than multiprocessors. Each part
// is a tile of its own in the schedule. The first kernel writes what a part has of its rows, unnormalised; a
// second one adds up each row's parts: in the order of keys or, where parts are fixed, as a tile that walks
// through several of them does, the last one first.
#pragma once

#include "cuda/accumulator_row.cuh"
#include "cuda/merge_parts.cuh"
#include "cuda/ptx_sync.cuh"
#include "cuda/scaled.cuh"
#include "cuda/tile_index.cuh"
#include "shared/forward_sm90a_params.h"

namespace flashjit::device {

// A row's part as the merge reads it.
template <class Softmax>
FLASHJIT_FN PartState part_state(const Softmax& softmax, int r) {
  return part_state<Softmax>(softmax.reference(r), softmax.relative_sum(r));
}

// Where parts are fixed, what a thread has of the parts of its tile that are complete, added up by the
// arithmetic of MergedRow. It lies in the thread's own memory, since its registers are full: a tile comes
// here once in forward_part_keys keys.
template <int size>
class PartsAside {
 public:
  FLASHJIT_FN void clear() { any_ = 0; }
  FLASHJIT_FN bool any() const { return any_; }

  // Adds the state of the part that softmax has; its outputs must follow.
  template <class Softmax>
  FLASHJIT_FN void add_state(const Softmax& softmax) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PartState part = part_state(softmax, r);
      PartState all{minus_infinity, 0};
      if (any()) all = {maximum_[r], sum_[r]};
      const float top = fmaxf(all.maximum, part.maximum), finite = top == minus_infinity ? 0 : top;
      const float kept = ex2_approx(all.maximum - finite), weight = ex2_approx(part.maximum - finite);
      maximum_[r] = top;
      sum_[r] = __fmaf_rn(weight, part.sum, __fmul_rn(all.sum, kept));
      kept_[r] = kept;
      weight_[r] = weight;
    }
  }
  // Adds outputs of that part, and keeps the sums.
  FLASHJIT_FN void add_outputs(const float (&output)[size]) {
    if (any()) {
      const float kept[] = {kept_[0], kept_[1]}, weight[] = {weight_[0], weight_[1]};
#pragma unroll
      for (int i = 0; i < size; ++i)
        output_[i] = __fmaf_rn(weight[i / 2 % 2], output[i], __fmul_rn(output_[i], kept[i / 2 % 2]));
    } else {
#pragma unroll
      for (int i = 0; i < size; ++i) output_[i] = output[i];
    }
    any_ = 1;
  }
  // Or gives the sums back, for the last part of a tile.
  FLASHJIT_FN void add_to_outputs(float (&output)[size]) const {
    const float kept[] = {kept_[0], kept_[1]}, weight[] = {weight_[0], weight_[1]};
#pragma unroll
    for (int i = 0; i < size; ++i)
      output[i] = __fmaf_rn(weight[i / 2 % 2], output[i], __fmul_rn(output_[i], kept[i / 2 % 2]));
  }
  template <class Softmax>
  FLASHJIT_FN void give_state(Softmax& softmax, int lane) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.set(r, maximum_[r], sum_[r], lane);
  }

 private:
  // Volatile, so that the compiler leaves it in memory.
  volatile float output_[size], maximum_[2], sum_[2], kept_[2], weight_[2];
  // In a register, as each tile's end asks. Measured: in memory it costs consumers of 128 columns 8% of the
  // time of long sequences (tests/bench/gpu_forward.md).
  int any_;
};

// Writes two rows of a part as a thread has them, in accumulators of the columns from first_column on.
// row: the first one's number in the workspace; the second is 8 further. left: rows from the first one on
// that are somebody's; all_rows: the others have places, too.
template <int head_dim_v, bool all_rows, class Softmax, int size>
FLASHJIT_FN void write_part(const Sm90aForwardParams& p, int row, int left, int lane, int first_column,
                            const float (&output)[size], const Softmax& softmax) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool exists = all_rows || 8 * r < left;
    const int to = row + 8 * r;
    if (exists) write_floats(p.parts_o + to * head_dim_v + first_column, output, r, 1.f, lane % 4);
    if (first_column > 0) continue;
    const PartState part = part_state(softmax, r);
    const u32 state[] = {__float_as_uint(part.maximum), __float_as_uint(part.sum)};
    if (exists && lane % 4 == 0) st_global_v2(p.parts_state + 2 * to, state);
  }
}

}  // namespace flashjit::device
