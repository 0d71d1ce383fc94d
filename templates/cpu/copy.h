// Copies rows of a KV cache to other places, straight or by way of the workspace, on a CPU.
#pragma once

#include "cpu/vector.h"
#include "shared/copy_params.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct CopyCpuSpec {
  using kv_dtype = void;
  static constexpr KvScale kv_scale = KvScale::tensor;
  static constexpr bool v_in_k = false;
};

template <class Spec>
struct Copy {
  using Element = typename OutputElement<typename Spec::kv_dtype, typename Spec::Element>::type;

  const CopyParams& p;

  // Items are rows.
  FLASHJIT_FN void run(i64 begin, i64 end) const {
    for (i64 index = begin; index < end; ++index) {
      const i64 from = p.from.slots[index], to = p.to.slots[index];
      if (!has_slot(p.from, from) || !has_slot(p.to, to)) continue;
      move(place_of(p.from, index, from), place_of(p.to, index, to));
    }
  }

 private:
  FLASHJIT_FN void move(RowPlace from, RowPlace to) const {
    for (u32 head = 0; head < p.heads; ++head) {
      constexpr bool moves_scales = Spec::kv_scale == KvScale::token_head;
      copy<Spec::head_dim>(element(p.from.k, from, head), element(p.to.k, to, head));
      if constexpr (moves_scales) scale(p.to.k_scale, to, head) = scale(p.from.k_scale, from, head);
      if constexpr (Spec::v_in_k) continue;
      copy<Spec::head_dim_v>(element(p.from.v, from, head), element(p.to.v, to, head));
      if constexpr (moves_scales) scale(p.to.v_scale, to, head) = scale(p.from.v_scale, from, head);
    }
  }
  // The bits of a row, in pieces of 32 and of 8 bytes: rows are no shorter than 8 elements.
  template <int dim>
  FLASHJIT_FN static void copy(const Element* from, Element* to) {
    constexpr int bytes = dim * static_cast<int>(sizeof(Element)), whole = bytes / 32 * 32;
    const char* const in = reinterpret_cast<const char*>(from);
    char* const out = reinterpret_cast<char*>(to);
    for (int at = 0; at < whole; at += 32) copy_piece<Int8>(in + at, out + at);
#pragma unroll
    for (int at = whole; at < bytes; at += 8) copy_piece<u64>(in + at, out + at);
  }
  template <class Piece>
  FLASHJIT_FN static void copy_piece(const char* from, char* to) {
    const Piece piece = load_unaligned<Piece>(from);
    __builtin_memcpy(to, &piece, sizeof piece);
  }
  FLASHJIT_FN static Element* element(const TensorView& t, RowPlace at, u32 head) {
    return static_cast<Element*>(t.data) + t.offset(at.page, at.row, head);
  }
  FLASHJIT_FN static float& scale(const KvScales& t, RowPlace at, u32 head) {
    return const_cast<float*>(t.data)[t.offset(at.page, at.row, head)];
  }
};

template <class Spec>
FLASHJIT_FN void copy_rows(const CopyParams& params, i64 begin, i64 end) {
  Copy<Spec>{params}.run(begin, end);
}

}  // namespace flashjit::device
