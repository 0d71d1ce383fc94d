// Copies rows of a KV cache to other places, straight or by way of the workspace.
#pragma once

#include "cuda/ptx_sync.cuh"
#include "cuda/row_piece.cuh"
#include "shared/copy_params.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct CopyCudaSpec {
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool v_in_k = false;
};

template <class Spec, class Config>
class Copy {
  using Element = typename OutputElement<typename Spec::kv_dtype, typename Spec::Element>::type;

  // How a row lies in pieces of 16 bytes, or of 8 where these do not divide it.
  template <int dim>
  struct Pieces {
    static constexpr int bytes = dim * static_cast<int>(sizeof(Element)) % 16 == 0 ? 16 : 8,
                         columns = bytes / static_cast<int>(sizeof(Element)), count = dim / columns;
    using Piece = RowPiece<Element, columns>;
  };
  using OfK = Pieces<Spec::head_dim>;
  using OfV = Pieces<Spec::head_dim_v>;
  static constexpr bool moves_scales = Spec::kv_scale == KvScale::token_head, has_values = !Spec::v_in_k;

 public:
  // Of a row of one head.
  static constexpr u32 items = has_values ? max(OfK::count, OfV::count) : OfK::count;

  FLASHJIT_FN static void run(const CudaCopyParams& p) {
    griddepcontrol_launch_dependents();
    const u64 thread = u64{ctaid_x()} * (Config::num_warps * 32) + tid_x();
    const u64 index = p.items.quotient(thread);
    i64 from = -1, to = -1;
    if (index < static_cast<u64>(p.rows)) {
      from = p.from.slots[index];
      to = p.to.slots[index];
    }
    // The step before has gathered the rows.
    if (p.from.in_workspace) griddepcontrol_wait();
    if (!has_slot(p.from, from) || !has_slot(p.to, to)) return;
    const auto item = static_cast<u32>(thread - index * p.items.size);
    move(p, place_of(p.from, static_cast<i64>(index), from), place_of(p.to, static_cast<i64>(index), to),
         item / items, static_cast<int>(item % items));
  }

 private:
  // All loads are in flight before the first store.
  FLASHJIT_FN static void move(const CudaCopyParams& p, RowPlace from, RowPlace to, u32 head, int item) {
    const bool has_k = item < OfK::count, has_v = has_values && item < OfV::count;
    typename OfK::Piece k;
    typename OfV::Piece v;
    const int column_k = item * OfK::columns, column_v = item * OfV::columns;
    if (has_k) k.load(element(p.from.k, from, head) + column_k);
    if (has_v) v.load(element(p.from.v, from, head) + column_v);
    if (moves_scales && item == 0) {
      const float k_scale = scale(p.from.k_scale, from, head),
                  v_scale = has_values ? scale(p.from.v_scale, from, head) : 0;
      scale(p.to.k_scale, to, head) = k_scale;
      if (has_values) scale(p.to.v_scale, to, head) = v_scale;
    }
    if (has_k) k.store(element(p.to.k, to, head) + column_k);
    if (has_v) v.store(element(p.to.v, to, head) + column_v);
  }
  FLASHJIT_FN static Element* element(const TensorView& t, RowPlace at, u32 head) {
    return static_cast<Element*>(t.data) + t.offset(at.page, at.row, head);
  }
  FLASHJIT_FN static float& scale(const KvScales& t, RowPlace at, u32 head) {
    return const_cast<float*>(t.data)[t.offset(at.page, at.row, head)];
  }
};

template <class Spec, class Config>
FLASHJIT_FN void copy_rows(const CudaCopyParams& params) {
  Copy<Spec, Config>::run(params);
}

}  // namespace flashjit::device
