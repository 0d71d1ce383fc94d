// 8-bit keys whose first columns are their values, for sm_90a's forward: a block of them becomes one tile,
// which both products read.
#pragma once

#include "cuda/forward_sm90a_quantised.cuh"
#include "shared/ds_mla.h"

namespace flashjit::device {

// For a converting warp. Warps take turns at pieces of a few rows and 128 columns, and then at the rest: half
// as many columns of twice the rows, or columns that are only copied. A lane converts 16 columns of some
// rows.
template <class Kernel>
class Sm90aLatents {
  using Spec = typename Kernel::Spec;
  using Shared = typename Kernel::Shared;
  using Element = typename Shared::QkElement;
  static constexpr Sm90aLayout layout = Shared::layout;
  static constexpr bool has_scales = Shared::converts == Converts::ds_mla;
  using KvElement = typename Choose<has_scales, fp8_e4m3, typename Spec::kv_dtype>::type;
  static constexpr u32 warps = Kernel::converters, block_n = Kernel::block_n, row_bytes = layout.stored_k_row;
  static constexpr u32 piece_parts = 8, passes = warps > 4 ? 2 : 4, piece_rows = 4 * passes;
  static constexpr u32 parts = ceil_div(has_scales ? DsMla::columns : Spec::head_dim, 16);
  static constexpr bool has_half = block_n % 32 == 0 && parts % piece_parts > 0 && parts % piece_parts <= 4;
  static constexpr u32 row_pieces = block_n / piece_rows;
  static constexpr u32 pieces = row_pieces * (has_half ? parts / piece_parts : ceil_div(parts, piece_parts));
  static_assert(Shared::converts != Converts::scaled_rows, "scores would not take scales, and values would");
  static_assert(!has_scales || row_bytes == Sm90aLayout::ds_mla_row);
  static_assert(Sm90aLayout::ds_mla_row == DsMla::bytes && DsMla::group == 16 * piece_parts);

 public:
  FLASHJIT_FN Sm90aLatents(const Shared& shared, u32 warp) : shared_(shared), warp_(warp) {}

  // A slot's rows; those from `end` on become zeros.
  FLASHJIT_FN void convert(int slot, u32 tile, int end) const {
    const u32 from = shared_.stored(slot);
    const Lane<8> lane(from, tile, end);
    for (u32 piece = warp_; piece < pieces; piece += warps)
      lane.convert(piece % row_pieces * piece_rows, piece / row_pieces);
    const u32 turn = (warp_ + warps - pieces % warps) % warps;
    if constexpr (has_half) {
      const Lane<4> of_half(from, tile, end);
      for (u32 first = turn * 2 * piece_rows; first < block_n; first += warps * 2 * piece_rows)
        of_half.convert(first, parts / piece_parts);
    }
    if constexpr (has_scales)
      for (u32 first = turn * piece_rows; first < block_n; first += warps * piece_rows)
        copy_rotary(from, tile + DsMla::columns / 64 * layout.kv_panel, first, end);
  }

 private:
  // 16 bytes of rows of a slot that lie `apart`.
  template <u32 apart>
  FLASHJIT_FN static void load(u32 (&stored)[passes][4], u32 from, int end) {
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass) ld_shared_v4(stored[pass], from + pass * apart * row_bytes);
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass)
      if (static_cast<int>(pass * apart) >= end)
        stored[pass][0] = stored[pass][1] = stored[pass][2] = stored[pass][3] = 0;
  }

  // A lane's place in a piece of so many parts of 16 columns: one part of rows that lie `apart`.
  template <u32 piece_parts_>
  class Lane {
    static constexpr u32 apart = 32 / piece_parts_;

   public:
    FLASHJIT_FN Lane(u32 slot, u32 tile, int end)
        : part_(threadIdx.x % piece_parts_), row_(threadIdx.x % 32 / piece_parts_), end_(end) {
      from_ = slot + row_ * row_bytes;
      // The second four of eight lanes write their columns' second half first: so eight lanes write all
      // banks.
      swaps_ = part_ / 4;
      to_ = tile + swaps_ * layout.kv_panel + row_ * 128 + ((part_ % 4 * 2 + swaps_) ^ row_ % 8) * 16;
    }
    // Rows from `first` on, and the columns'th 128 columns.
    FLASHJIT_FN void convert(u32 first, u32 columns) const {
      if (parts % piece_parts != 0 && part_ + columns * piece_parts >= parts) return;
      const int end = end_ - static_cast<int>(first + row_);
      const u32 row = from_ + first * row_bytes, to = to_ + columns * (2 * layout.kv_panel) + first * 128;
      u32 stored[passes][4];
      load<apart>(stored, row + (part_ + columns * piece_parts) * 16, end);
      float scales[passes];
      if constexpr (has_scales) {
#pragma unroll
        for (u32 pass = 0; pass < passes; ++pass) {
          scales[pass] = ld_shared(row + pass * apart * row_bytes + DsMla::scales + columns * 4);
          if (static_cast<int>(pass * apart) >= end) scales[pass] = 0;
        }
      }
#pragma unroll
      for (u32 pass = 0; pass < passes; ++pass) {
        const auto& of_row = stored[pass];
        const u32 words[] = {swaps_ ? of_row[2] : of_row[0], swaps_ ? of_row[3] : of_row[1],
                             swaps_ ? of_row[0] : of_row[2], swaps_ ? of_row[1] : of_row[3]};
        u32 x[8];
        if constexpr (has_scales)
          convert_chunk<Element, KvElement>(words, x, scales[pass]);
        else
          convert_chunk<Element, KvElement>(words, x);
        const u32 at = (to ^ pass * apart % 8 * 16) + pass * apart * 128;
        st_shared_v4(at, x[0], x[1], x[2], x[3]);
        st_shared_v4(at ^ 16, x[4], x[5], x[6], x[7]);
      }
    }

   private:
    u32 part_, row_, swaps_, from_, to_;
    int end_;
  };

  // The columns that are stored as products take them.
  FLASHJIT_FN static void copy_rotary(u32 slot, u32 panel, u32 first, int end) {
    const u32 row = first + threadIdx.x % 32 / 8, chunk = threadIdx.x % 8;
    u32 stored[passes][4];
    load<4>(stored, slot + row * row_bytes + DsMla::rotary + chunk * 16, end - static_cast<int>(row));
    const u32 to = panel + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (u32 pass = 0; pass < passes; ++pass)
      st_shared_v4((to ^ pass % 2 * 64) + pass * 512, stored[pass][0], stored[pass][1], stored[pass][2],
                   stored[pass][3]);
  }

  const Shared& shared_;
  const u32 warp_;
};

}  // namespace flashjit::device
