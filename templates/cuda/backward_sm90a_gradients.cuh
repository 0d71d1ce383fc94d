// How a consumer of sm_90a's backward passes its sums on: dQ of each step, which several blocks of the grid
// add up, dQ's rows of a turn, and dK and dV of a place.
#pragma once

#include "cuda/backward_sm90a_shared.cuh"
#include "cuda/backward_sm90a_turns.cuh"
#include "cuda/gradient_row.cuh"
#include "cuda/ptx_reduce.cuh"
#include "shared/backward_cuda_params.h"

namespace flashjit::device {

template <class Kernel>
struct Sm90aBackwardGradients {
  using Spec = typename Kernel::Spec;
  using Gradient = typename Kernel::Gradient;
  using Shared = typename Kernel::Shared;
  using DsRing = typename Kernel::DsRing;
  using Work = typename Kernel::Work;
  using Turns = typename Kernel::Turns;
  static constexpr Sm90aBackwardLayout layout = Kernel::layout;
  static constexpr int stages = Kernel::stages, dq_parts = Kernel::dq_parts;

  const CudaBackwardParams& p;
  const Shared& shared;
  int warpgroup, warp, lane;

  // Adds a part of dQ of the block at `block` to the sums, or gives it to the thread that does. Tiles of
  // 16 x 8 sums have a warp's accumulator as it lies.
  // of: the step's dS. last: of the place.
  template <int part, int size>
  FLASHJIT_FN void pass_dq(const float (&dq)[size], const DsRing& of, u32 place, int block, bool last) const {
    if constexpr (layout.stages_dq) {
      wait_for_dq_buffer(part, of);
      const u32 to = shared.dq(warpgroup) + warp * (size * 2 * 16 * 4) + lane * 16;
#pragma unroll
      for (int i = 0; i < size / 4; ++i)
        st_shared_v4(to + i * (32 * 16), __float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                     __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3]));
      fence_proxy_async();
      announce_dq(last && part == dq_parts - 1 ? last_dq : 0, place, block);
    } else {
      if constexpr (Kernel::orders_dq && part == 0)
        mbarrier_wait(shared.dq_empty(warpgroup), step_parity(of));
      constexpr Sm90aBackwardLayout parts = layout;  // device memory has no place for a static member
      constexpr int row_floats = cuda_backward_row(Spec::head_dim);
      const int row = (layout.divides_rows ? warpgroup * 64 : 0) + warp * 16;
      float* const to = p.dq_sums + (static_cast<i64>(block) * place_rows + row) * row_floats + lane * 4;
      // The product of the last columns may be wider than the sums.
#pragma unroll
      for (int i = 0; i < size / 4; ++i) {
        const int column = parts.dq_column(part, warpgroup, 8 * i);
        if (column < row_floats)
          red_add_v4(to + column * 16, {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]});
      }
    }
  }
  // Says that the warpgroup's part of the place's dQ is complete, unless its last dQ said so. Where another
  // thread adds it, this arrives at the barrier of the next dS, so that messages keep the ring's order. The
  // caller advances the ring.
  FLASHJIT_FN void end_place(const DsRing& of, u32 place, int block) const {
    if constexpr (!layout.stages_dq) {
      __syncwarp();
      if (lane == 0) Turns(p).end_place(place, 1);
    } else {
      for (int part = 0; part < dq_parts; ++part) {
        wait_for_dq_buffer(part, of);
        announce_dq(no_dq, place, block);
      }
      mbarrier_arrive_if(lane == 0, shared.ds_full(of.stage));
    }
  }
  // Where threads add their own dQ in a fixed order: asks for the turn of the block's rows, and says that
  // the rows before have been added.
  FLASHJIT_FN void ask_for_dq(u32 place, int block) const { announce_dq(0, place, block); }
  // Says that no more dQ comes.
  FLASHJIT_FN void end_dq(const DsRing& of, u32 place, int block) const {
    if constexpr (layout.stages_dq) wait_for_dq_buffer(0, of);
    announce_dq(no_more_blocks, place, block);
  }

  // Writes dQ of the rows of a turn without a place, 32 columns at a time: with more, registers spill.
  FLASHJIT_FN void write_dq(const BackwardMessage& turn) const {
    Problem problem = Kernel::template problem_of<Spec::Mask::padding>(p, turn.head_of_rows());
    const int end = min(turn.first_row + turn.rows(), problem.rows);
#pragma unroll 1
    for (int head = 0; head < p.place_group; ++head, ++problem.head_q)
#pragma unroll 1
      for (int row = turn.first_row + (warpgroup * 4 + warp) * 16; row < end; row += Turns::part_rows)
        dq_rows<Spec>(p, problem, row).convert();
  }
  // Writes dQ of the turn's rows. `meanwhile` is done while the sums of the first ones come, if registers
  // allow.
  template <class Meanwhile>
  FLASHJIT_FN void write_dq(const BackwardMessage& turn, const Meanwhile& meanwhile) const {
    constexpr bool overlaps = Spec::head_dim + Spec::head_dim_v / 2 <= 192;
    Problem problem = Kernel::template problem_of<Spec::Mask::padding>(p, turn.head_of_rows());
    const int end = min(turn.first_row + turn.rows(), problem.rows);
    const int first = turn.first_row + (warpgroup * 4 + warp) * 16;
    int row = first, heads_left = p.place_group;
    if constexpr (!overlaps) meanwhile();
    {
      // All columns at once, as few warps wait for them, and any rows if there are none: a branch would cost
      // registers.
      float dq[Spec::head_dim / 2];
      const auto of_warp = dq_rows<Spec>(p, problem, row < end ? row : 0);
      of_warp.template load<Spec::head_dim>(dq, 0);
      if constexpr (overlaps) meanwhile();
      if (row < end) of_warp.template write<Spec::head_dim>(dq, 0);
    }
#pragma unroll 1
    while (row < end) {
      row += Turns::part_rows;
      if (row >= end && --heads_left > 0) {
        ++problem.head_q;
        row = first;
      }
      if (row < end) dq_rows<Spec>(p, problem, row).convert();
    }
  }

  // Writes dK and dV of a place, or adds them to the sums of a divided group. One that the kernel does not
  // make has no elements of use.
  template <int k_size, int v_size>
  FLASHJIT_FN void write_dk_dv(const Work& work, const float (&dk)[k_size], const float (&dv)[v_size]) const {
    if (Kernel::has_places && Kernel::makes_dq && p.dk_sums != nullptr) {
      // Beyond its last key a sequence has no rows in the workspace.
      if (work.keys.begin >= work.keys_end) return;
      add_gradient<Kernel::makes_dk ? Spec::head_dim : 0>(p.dk_sums, dk, work);
      add_gradient<Kernel::makes_dv ? Spec::head_dim_v : 0>(p.dv_sums, dv, work);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key(work) + lane / 4 + 8 * r;
      const bool inside = key < work.keys_end, valid = key < work.keys.end;
      const auto row = [&](const TensorView& t) {
        return static_cast<Gradient*>(t.data) + work.problem.k_offset(t) + key * t.row_stride;
      };
      if constexpr (Kernel::makes_dk)
        write_gradient<Spec::batch_invariant>(row(p.dk), dk, r, valid ? p.scale : 0, inside, lane % 4);
      if constexpr (Kernel::makes_dv)
        write_gradient<Spec::batch_invariant>(row(p.dv), dv, r, valid ? p.dv_scale : 0, inside, lane % 4);
    }
  }

 private:
  // A step's only part has the step's parity, two parts have both parities.
  FLASHJIT_FN void wait_for_dq_buffer(int part, const DsRing& of) const {
    mbarrier_wait(shared.dq_empty(warpgroup), (dq_parts > 1 ? part : step_parity(of)) ^ 1);
  }
  FLASHJIT_FN static u32 step_parity(const DsRing& of) {
    return (of.stage + of.parity * layout.ds_buffers) % 2;
  }
  FLASHJIT_FN void announce_dq(int word, u32 place, int block) const {
    if (threadIdx.x % 128 == 0)
      st_message(shared.message(stages + warpgroup), word, static_cast<int>(place), block);
    __syncwarp();
    mbarrier_arrive_if(lane == 0, shared.dq_full(warpgroup));
  }
  // The first of the warp's 16 keys.
  FLASHJIT_FN int first_key(const Work& work) const {
    return work.keys.begin + warpgroup * layout.warpgroup_keys + warp * 16;
  }
  // Adds the warp's 16 keys of dK or dV to the sums of the group.
  template <int columns, int size>
  FLASHJIT_FN void add_gradient(float* to_sums, const float (&gradient)[size], const Work& work) const {
    constexpr int row_floats = cuda_backward_row(columns);
    const Problem& problem = work.problem;
    const i64 row = problem.head_kv * p.key_rows +
                    p.first_key_row(problem.batch, problem.first_k, Spec::varlen) + first_key(work);
    float* const to = to_sums + row * row_floats + lane * 4;
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
      red_add_v4(to + i * (16 * 8),
                 {gradient[4 * i], gradient[4 * i + 1], gradient[4 * i + 2], gradient[4 * i + 3]});
  }
};

}  // namespace flashjit::device
