// Writes new rows of K and V into their caches, with rotary embedding of K and Q.
#pragma once

#include "cuda/row_piece.cuh"
#include "shared/append_layout.h"
#include "shared/token_place.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct AppendCudaSpec {
  static constexpr bool varlen = false;
  static constexpr RotaryStyle rotary = RotaryStyle::none;
  static constexpr int rotary_dim = 0;  // with rotary: 0 is head_dim
  static constexpr bool rotates_q = false;
  using RotaryTable = void;  // angles are computed
};

// An item's two pieces of a row.
template <class Element, int columns>
struct TwoPieces {
  RowPiece<Element, columns> first, second;
  bool has_second;
};

template <class Spec, class Config>
struct Append {
  using Element = typename Spec::Element;
  using Table = typename Spec::RotaryTable;
  static constexpr bool rotates = Spec::rotary != RotaryStyle::none,
                        halves = Spec::rotary == RotaryStyle::half;
  static constexpr bool has_tables = !__is_same(Table, void);
  static constexpr int dim = !rotates ? 0 : Spec::rotary_dim ? Spec::rotary_dim : Spec::head_dim;
  static constexpr RowItems of_k{Spec::rotary, dim, Spec::head_dim, sizeof(Element)};
  static constexpr RowItems of_v{RotaryStyle::none, 0, Spec::head_dim_v, sizeof(Element)};

  using Params =
      typename Choose<rotates, Rotated<CudaAppendParams, has_tables ? 0 : dim / 2>, CudaAppendParams>::type;

  FLASHJIT_FN static void run(const Params& p) {
    u32 item = ctaid_y() * (Config::num_warps * 32) + tid_x();
    const u32 of_block = item * p.items_inverse >> 16;
    item -= of_block * p.items;
    const i64 token = i64{ctaid_x()} * p.tokens_of_block + of_block;
    if (of_block >= p.tokens_of_block || item >= p.items || token >= p.tokens) return;
    constexpr u32 items_of_k = of_k.items, items_of_v = of_v.items;
    const u32 items_k = p.heads_kv * items_of_k, items_v = p.heads_kv * items_of_v;
    const Token at{p, static_cast<int>(token), row_of_token<Spec::varlen>(p, static_cast<int>(token))};
    if (item < items_k) {
      write<true>(at, p.k_new, p.k, item / items_of_k, item % items_of_k);
    } else if (item < items_k + items_v) {
      item -= items_k;
      write<false>(at, p.v_new, p.v, item / items_of_v, item % items_of_v);
    } else if constexpr (Spec::rotates_q) {
      item -= items_k + items_v;
      rotate_q(at, item / items_of_k, item % items_of_k);
    }
  }

 private:
  struct Token {
    const Params& p;
    int index;
    TokenPlace place;
  };

  // Into a cache. The loads need not wait for the token's place.
  template <bool is_k>
  FLASHJIT_FN static void write(Token at, const TensorView& from, const TensorView& to, u32 head, u32 item) {
    constexpr RowItems items = is_k ? of_k : of_v;
    TwoPieces<Element, items.columns> pieces;
    const Element* const row =
        static_cast<const Element*>(from.data) + from.offset(at.place.entry, at.place.row, head);
    const int first = items.first(static_cast<int>(item)), second = items.second(static_cast<int>(item));
    pieces.has_second = second < (is_k ? Spec::head_dim : Spec::head_dim_v);
    pieces.first.load_lasting(row + first);
    if (pieces.has_second) pieces.second.load_lasting(row + second);
    find_in_cache<Spec::varlen>(at.p, at.index, at.place);
    if (!at.place.in_cache) return;
    if constexpr (is_k && rotates) rotate(at, first, second, pieces);
    Element* const out = static_cast<Element*>(to.data) + to.offset(at.place.page, at.place.page_row, head);
    pieces.first.store(out + first);
    if (pieces.has_second) pieces.second.store(out + second);
  }

  FLASHJIT_FN static void rotate_q(Token at, u32 head, u32 item) {
    constexpr RowItems items = of_k;
    const auto& p = at.p;
    TwoPieces<Element, items.columns> pieces;
    const Element* const row =
        static_cast<const Element*>(p.rotary.q.data) + p.rotary.q.offset(at.place.entry, at.place.row, head);
    const int first = items.first(static_cast<int>(item)), second = items.second(static_cast<int>(item));
    pieces.has_second = second < Spec::head_dim;
    pieces.first.load(row + first);
    if (pieces.has_second) pieces.second.load(row + second);
    find_in_cache<Spec::varlen>(p, at.index, at.place);
    if (!at.place.in_batch) return;
    rotate(at, first, second, pieces);
    Element* const out = static_cast<Element*>(p.rotary.q_out.data) +
                         p.rotary.q_out.offset(at.place.entry, at.place.row, head);
    pieces.first.store(out + first);
    if (pieces.has_second) pieces.second.store(out + second);
  }

  template <int columns>
  FLASHJIT_FN static void rotate(const Token& at, int first, int second,
                                 TwoPieces<Element, columns>& pieces) {
    if (first >= dim) return;  // both pieces are beyond the rotated columns
    const i64 position = at.p.rotary.positions ? at.p.rotary.positions[at.index] : at.place.position;
    if constexpr (halves) {
      float a[columns], b[columns], cosines[columns], sines[columns];
      angles(at.p, position, first, cosines, sines);
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const float x = pieces.first[c], y = pieces.second[c];
        a[c] = x * cosines[c] - y * sines[c];
        b[c] = x * sines[c] + y * cosines[c];
      }
      pieces.first.set(a);
      pieces.second.set(b);
    } else {
      rotate_inside(at.p, position, first, pieces.first);
      if (second < dim) rotate_inside(at.p, position, second, pieces.second);
    }
  }

  // Neighbours are pairs.
  template <class Piece>
  FLASHJIT_FN static void rotate_inside(const Params& p, i64 position, int column, Piece& piece) {
    constexpr int columns = of_k.columns;
    float rotated[columns], cosines[columns / 2], sines[columns / 2];
    angles(p, position, column / 2, cosines, sines);
#pragma unroll
    for (int c = 0; c < columns; c += 2) {
      const float x = piece[c], y = piece[c + 1];
      rotated[c] = x * cosines[c / 2] - y * sines[c / 2];
      rotated[c + 1] = x * sines[c / 2] + y * cosines[c / 2];
    }
    piece.set(rotated);
  }

  // Of consecutive pairs.
  template <int count>
  FLASHJIT_FN static void angles(const Params& p, i64 position, int pair, float (&cosines)[count],
                                 float (&sines)[count]) {
    if constexpr (has_tables) {
      const i64 row = min(max(position, i64{0}), i64{p.rotary.table_rows} - 1);
      load_table(static_cast<const Table*>(p.rotary.cos) + row * p.rotary.cos_stride + pair, cosines);
      load_table(static_cast<const Table*>(p.rotary.sin) + row * p.rotary.sin_stride + pair, sines);
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i)
        cosine_and_sine(angle_of(p.rotary.turns[pair + i], position), cosines[i], sines[i]);
    }
  }
  template <int count>
  FLASHJIT_FN static void load_table(const Table* from, float (&to)[count]) {
    constexpr int bytes = count * sizeof(Table), columns = (bytes < 16 ? bytes : 16) / sizeof(Table);
#pragma unroll
    for (int i = 0; i < count; i += columns) {
      RowPiece<Table, columns> piece;
      piece.load_lasting(from + i);
#pragma unroll
      for (int c = 0; c < columns; ++c) to[i + c] = piece[c];
    }
  }

  FLASHJIT_FN static void cosine_and_sine(u32 angle, float& cosine, float& sine) {
    const u32 quarter = (angle + 0x20000000u) >> 30;
    const float r = static_cast<float>(static_cast<int>(angle - (quarter << 30))) * rest_to_radians;
    const float s = sine_of_rest(r), c = cosine_of_rest(r);
    const bool swaps = quarter & 1;
    const u32 cosine_bits = __float_as_uint(swaps ? s : c), sine_bits = __float_as_uint(swaps ? c : s);
    cosine = __uint_as_float(cosine_bits ^ ((quarter + 1) & 2) << 30);
    sine = __uint_as_float(sine_bits ^ (quarter & 2) << 30);
  }
};

template <class Spec, class Config>
FLASHJIT_FN void append(const typename Append<Spec, Config>::Params& params) {
  Append<Spec, Config>::run(params);
}

}  // namespace flashjit::device
