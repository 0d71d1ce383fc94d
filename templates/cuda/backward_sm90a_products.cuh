// The products of sm_90a's backward, with their operands in shared memory.
#pragma once

#include "cuda/backward_sm90a_shared.cuh"

namespace flashjit::device {

// Each begins a product of a consumer and closes its group. `tile` is the offset in bytes of a tile's rows in
// a panel of Q or dO.
template <class Kernel>
struct Sm90aBackwardProducts {
  using Shared = typename Kernel::Shared;
  using Products = typename Kernel::Products;
  static constexpr Sm90aBackwardLayout layout = Kernel::layout;

  const Shared& shared;
  int warpgroup;

  // S^T = K Q^T of the warpgroup's keys.
  template <int size>
  FLASHJIT_FN void issue_scores(float (&scores)[size], int stage, int tile) const {
    wgmma_fence();
    Products::s(scores, wgmma_descriptor(shared.k() + own_keys(), 0), q_operand(stage, tile));
    wgmma_commit_group();
  }
  // dP^T = V dO^T.
  template <int size>
  FLASHJIT_FN void issue_dp(float (&dp)[size], int stage, int tile) const {
    wgmma_fence();
    Products::dp(dp, wgmma_descriptor(shared.v() + own_keys(), 0), do_operand(stage, tile));
    wgmma_commit_group();
  }
  // dV += P^T dO.
  template <int size, class Operand>
  FLASHJIT_FN void issue_dv(float (&dv)[size], const Operand& weights, int stage, int tile) const {
    wgmma_fence();
    Products::dv(dv, weights, do_operand(stage, tile), 1);
    wgmma_commit_group();
  }
  // dK += dS^T Q.
  template <int size, class Operand>
  FLASHJIT_FN void issue_dk(float (&dk)[size], const Operand& ds, int stage, int tile) const {
    wgmma_fence();
    Products::dk(dk, ds, q_operand(stage, tile), 1);
    wgmma_commit_group();
  }
  // The warpgroup's part of dQ = dS K.
  template <int part, int size>
  FLASHJIT_FN void issue_dq(float (&dq)[size], u32 buffer) const {
    const u64 ds = wgmma_descriptor(buffer + (layout.divides_rows ? warpgroup * (64 * 128) : 0), 0);
    wgmma_fence();
    if constexpr (layout.divides_rows || part < layout.dq_pairs)
      Products::dq(dq, ds, dq_keys(part));
    else
      Products::dq_last(dq, ds, dq_keys(part));
    wgmma_commit_group();
  }

 private:
  FLASHJIT_FN u64 q_operand(int stage, int tile) const {
    return wgmma_descriptor(shared.q(stage) + tile, layout.q_panel);
  }
  FLASHJIT_FN u64 do_operand(int stage, int tile) const {
    return wgmma_descriptor(shared.d_o(stage) + tile, layout.q_panel);
  }
  // Bytes from the start of K's and V's panels to the warpgroup's keys.
  FLASHJIT_FN u32 own_keys() const { return warpgroup * (layout.warpgroup_keys * 128); }
  // K's columns of a part of dQ.
  FLASHJIT_FN u64 dq_keys(int part) const {
    constexpr Sm90aBackwardLayout parts = layout;  // device memory has no place for a static member
    const int column = parts.dq_first_column(part, warpgroup), panel = column / layout.panel;
    return wgmma_descriptor(shared.k() + panel * layout.k_panel + column % layout.panel * 2,
                            parts.dq_leading(warpgroup));
  }
};

}  // namespace flashjit::device
