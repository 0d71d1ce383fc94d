// Writes new rows of K and V into 8-bit caches, with rotary embedding of K and Q. Scales are given, or
// computed for each token and head, with fp8_ds_mla for groups of its columns.
#pragma once

#include "cuda/append.cuh"
#include "cuda/kv_rounding.cuh"
#include "shared/append_quantised.h"
#include "shared/ds_mla.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct AppendQuantisedCudaSpec : AppendCudaSpec {
  static constexpr KvScale kv_scale = KvScale::tensor;
};

// A few consecutive elements of a row: as they are read, then as floats.
template <class Element, int columns>
class WidePiece {
 public:
  FLASHJIT_FN void load_lasting(const Element* from) { read_.load_lasting(from); }
  FLASHJIT_FN void widen() {
#pragma unroll
    for (int c = 0; c < columns; ++c) wide_[c] = read_[c];
  }
  FLASHJIT_FN float operator[](int c) const { return wide_[c]; }
  FLASHJIT_FN void set(const float (&x)[columns]) {
#pragma unroll
    for (int c = 0; c < columns; ++c) wide_[c] = x[c];
  }
  FLASHJIT_FN float largest() const {
    float largest = 0;
#pragma unroll
    for (int c = 0; c < columns; ++c) largest = fmaxf(largest, fabsf(wide_[c]));
    return largest;
  }
  template <class KvElement>
  FLASHJIT_FN void store(KvElement* to, const ScaleFactors& by) const {
    float x[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c) x[c] = wide_[c] * by.first * by.second;
    store_rounded(to, x);
  }
  FLASHJIT_FN void store(Element* to) const {
    RowPiece<Element, columns> rounded;
    rounded.set(wide_);
    rounded.store(to);
  }

 private:
  RowPiece<Element, columns> read_;
  float wide_[columns];
};

// Own: parameters besides those of scales and rotary embedding.
template <class Spec, class Config, class Own = CudaAppendParams>
struct AppendQuantised
    : Append<Spec, Config, typename Choose<is_ds_mla<typename Spec::kv_dtype>, Own, Quantised<Own>>::type> {
  // Whether scales are of groups of columns and lie in the rows.
  static constexpr bool in_groups = is_ds_mla<typename Spec::kv_dtype>;
  using Base = Append<Spec, Config, typename Choose<in_groups, Own, Quantised<Own>>::type>;
  using typename Base::Element;
  using typename Base::Params;
  using KvElement = typename Choose<in_groups, fp8_e4m3, typename Spec::kv_dtype>::type;
  static constexpr bool computes_scales = in_groups || Spec::kv_scale == KvScale::token_head;
  static constexpr int groups = in_groups ? DsMla::groups : 1;
  static constexpr QuantisedRows rows{computes_scales, Base::of_k, Base::of_v};

  FLASHJIT_FN static void run(const Params& p) {
    u32 thread;
    i64 token;
    if (!Base::find_item(p, token, thread)) return;
    constexpr u32 of_row_of_k = rows.threads(Base::of_k), of_row_of_v = rows.threads(Base::of_v);
    const u32 groups = (p.heads_kv + Base::heads_of_item - 1) / Base::heads_of_item;
    const u32 threads_k = groups * of_row_of_k, threads_v = p.heads_kv * of_row_of_v;
    const Token at{p, static_cast<int>(token), row_of_token<Spec::varlen>(p, static_cast<int>(token))};
    if (thread < threads_k) {
      write_rows<true>(at, thread);
    } else if (thread < threads_k + threads_v) {
      if constexpr (!Spec::v_in_k) write_rows<false>(at, thread - threads_k);
    } else if constexpr (Spec::rotates_q) {
      Base::template write_heads<true>(at, p.rotary.q, p.rotary.q_out, p.rotary.heads_q,
                                       thread - threads_k - threads_v);
    }
  }

 private:
  using typename Base::Token;

  // A thread's pieces of rows of K or V: the same columns of a few heads.
  template <bool is_k>
  struct Pieces {
    static constexpr RowItems items = is_k ? Base::of_k : Base::of_v;
    static constexpr int dim = is_k ? Spec::head_dim : Spec::head_dim_v;
    static constexpr int heads = is_k ? Base::heads_of_item : 1;
    static constexpr int threads = rows.threads(items), count = rows.items_of_thread(items);
    using Piece = WidePiece<Element, items.columns>;

    const int thread;  // of the row
    Piece a[count][heads], b[count][heads];

    FLASHJIT_FN explicit Pieces(int of_row) : thread(of_row) {}
    FLASHJIT_FN int item(int j) const { return thread + j * threads; }
    FLASHJIT_FN bool exists(int j) const { return item(j) < items.items; }
    FLASHJIT_FN int first(int j) const {
      constexpr RowItems row = items;  // nvcc has no device copy of a static member
      return row.first(item(j));
    }
    FLASHJIT_FN int second(int j) const {
      constexpr RowItems row = items;
      return row.second(item(j));
    }
    FLASHJIT_FN static int place_of(int column) { return is_k ? Base::place_of(column) : column; }
    // Calls f(piece, place of its first column in the row) for each piece of the i-th head.
    template <class F>
    FLASHJIT_FN void for_each(int i, F&& f) {
#pragma unroll
      for (int j = 0; j < count; ++j) {
        if (!exists(j)) continue;
        f(a[j][i], place_of(first(j)));
        if (second(j) < dim) f(b[j][i], place_of(second(j)));
      }
    }
    // Of a group of columns.
    FLASHJIT_FN float largest(int i, int group) const {
      const auto of = [&](const Piece& piece, int column) {
        return is_in(group, place_of(column)) ? piece.largest() : 0;
      };
      float largest = 0;  // pieces that do not exist are zeros
#pragma unroll
      for (int j = 0; j < count; ++j)
        largest = fmaxf(largest, fmaxf(of(a[j][i], first(j)), of(b[j][i], second(j))));
      return largest;
    }
    FLASHJIT_FN void widen() {
#pragma unroll
      for (int j = 0; j < count; ++j)
#pragma unroll
        for (int i = 0; i < heads; ++i) {
          a[j][i].widen();
          b[j][i].widen();
        }
    }
  };

  // The loads need not wait for the token's place.
  template <bool is_k>
  FLASHJIT_FN static void write_rows(Token at, u32 thread) {
    using Mine = Pieces<is_k>;
    const TensorView &from = is_k ? at.p.k_new : at.p.v_new, &to = is_k ? at.p.k : at.p.v;
    const u32 head = thread / Mine::threads * Mine::heads;
    Mine pieces(static_cast<int>(thread % Mine::threads));
    float scale[Mine::heads][groups] = {};
#pragma unroll
    for (int i = 0; i < Mine::heads; ++i) {
      if (head + i >= at.p.heads_kv) continue;
      const Element* const row =
          static_cast<const Element*>(from.data) + from.offset(at.place.entry, at.place.row, head + i);
      pieces.for_each(i, [&](typename Mine::Piece& piece, int place) { piece.load_lasting(row + place); });
      if constexpr (!computes_scales) {
        const KvScales& scales = scales_of<is_k>(at.p);
        scale[i][0] = ld_global_nc(scales.data + (head + i) * scales.head_stride);
      }
    }
    const i64 given = Base::given_position(at);
    find_in_cache<Spec::varlen>(at.p, at.index, at.place);
    pieces.widen();
    if constexpr (is_k && Base::rotates) {
      const i64 position = at.p.rotary.positions ? given : at.place.position;
#pragma unroll
      for (int j = 0; j < Mine::count; ++j)
        if (pieces.exists(j))
          Base::rotate(at.p, position, pieces.first(j), pieces.second(j), pieces.a[j], pieces.b[j]);
    }
    if constexpr (computes_scales)
#pragma unroll
      for (int i = 0; i < Mine::heads; ++i)
#pragma unroll
        for (int group = 0; group < groups; ++group)
          scale[i][group] = scale_of_row<KvElement>(largest_of_row(pieces.largest(i, group)));
    if (!is_in_cache(at.p, at.place)) return;
#pragma unroll
    for (int i = 0; i < Mine::heads; ++i) {
      if (head + i >= at.p.heads_kv) continue;
      const i64 place = to.offset(at.place.page, at.place.page_row, head + i);
      if constexpr (in_groups) {
        store_in_groups(pieces, i, static_cast<unsigned char*>(to.data) + place, scale[i]);
      } else {
        if (computes_scales && pieces.thread == 0) {
          const KvScales& scales = scales_of<is_k>(at.p);
          st_global(const_cast<float*>(scales.data) + at.place.page * scales.batch_stride +
                        at.place.page_row * scales.row_stride + (head + i) * scales.head_stride,
                    __float_as_uint(scale[i][0]));
        }
        const ScaleFactors by = factors_of(scale[i][0]);
        pieces.for_each(i, [&](const typename Mine::Piece& piece, int column) {
          piece.store(static_cast<KvElement*>(to.data) + place + column, by);
        });
      }
    }
  }
  // Of the i-th head, whose row begins at `row`.
  template <class Mine>
  FLASHJIT_FN static void store_in_groups(Mine& pieces, int i, unsigned char* row,
                                          const float (&scale)[groups]) {
    if (pieces.thread == 0)
#pragma unroll
      for (int group = 0; group < groups; ++group)
        st_global(row + DsMla::scales + group * 4, __float_as_uint(scale[group]));
    pieces.for_each(i, [&](const typename Mine::Piece& piece, int column) {
      if (column >= DsMla::columns)
        return piece.store(reinterpret_cast<Element*>(row + DsMla::rotary) + column - DsMla::columns);
      float own = scale[0];
#pragma unroll
      for (int group = 1; group < groups; ++group)
        if (is_in(group, column)) own = scale[group];
      piece.store(reinterpret_cast<KvElement*>(row) + column, factors_of(own));
    });
  }

  FLASHJIT_FN static ScaleFactors factors_of(float scale) {
    return ScaleFactors(scale, [](float x) { return rcp_approx(x); });
  }
  FLASHJIT_FN static bool is_in(int group, int column) {
    return !in_groups || column / DsMla::group == group;
  }
  template <bool is_k>
  FLASHJIT_FN static const KvScales& scales_of(const Params& p) {
    return is_k ? p.k_scale : p.v_scale;
  }

  // Of the threads that have the row. All of them come here.
  FLASHJIT_FN static float largest_of_row(float largest) {
    constexpr u32 lanes = rows.lanes, all = lanes == 32 ? 0xffffffffu : (1u << lanes % 32) - 1;
    const u32 mask = all << tid_x() % 32 / lanes * lanes;
#pragma unroll
    for (u32 step = lanes / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(mask, largest, static_cast<int>(step)));
    return largest;
  }
};

template <class Spec, class Config>
FLASHJIT_FN void append_quantised(const typename AppendQuantised<Spec, Config>::Params& params) {
  AppendQuantised<Spec, Config>::run(params);
}

}  // namespace flashjit::device
