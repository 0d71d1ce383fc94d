// Writes new rows of K and V into their caches, with rotary embedding of K and Q.
#pragma once

#include "cuda/row_piece.cuh"
#include "shared/append_layout.h"
#include "shared/token_place.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct AppendCudaSpec {
  static constexpr bool varlen = false, v_in_k = false;
  static constexpr RotaryStyle rotary = RotaryStyle::none;
  static constexpr int rotary_first = 0, rotary_dim = 0;  // with rotary: a dim of 0 is all columns from first
  static constexpr bool rotates_q = false;
  using RotaryTable = void;  // angles are computed
};

// Own: parameters besides those of rotary embedding.
template <class Spec, class Config, class Own = CudaAppendParams>
struct Append {
  using Element = typename Spec::Element;
  using Table = typename Spec::RotaryTable;
  static constexpr bool rotates = Spec::rotary != RotaryStyle::none,
                        halves = Spec::rotary == RotaryStyle::half;
  static constexpr bool has_tables = is_table<Table>;
  static constexpr int dim = !rotates           ? 0
                             : Spec::rotary_dim ? Spec::rotary_dim
                                                : Spec::head_dim - Spec::rotary_first;
  static constexpr RowItems of_k{Spec::rotary, dim, Spec::head_dim, sizeof(Element)};
  static constexpr int columns = of_k.columns, heads_of_item = heads_of_append_item(rotates);
  using PieceK = RowPiece<Element, columns>;
  static constexpr RowItems of_v{RotaryStyle::none, 0, Spec::v_in_k ? 0 : Spec::head_dim_v, sizeof(Element)};

  using Params = typename Choose<rotates, Rotated<Own, has_tables ? 0 : dim / 2>, Own>::type;

  FLASHJIT_FN static void run(const Params& p) {
    u32 item;
    i64 token;
    if (!find_item(p, token, item)) return;
    const u32 items_k = items_of_heads(p.heads_kv), items_v = p.heads_kv * of_v.items;
    const Token at{p, static_cast<int>(token), row_of_token<Spec::varlen>(p, static_cast<int>(token))};
    if (item < items_k) {
      write_heads<false>(at, p.k_new, p.k, p.heads_kv, item);
    } else if (item < items_k + items_v) {
      if constexpr (!Spec::v_in_k) copy_v(at, item - items_k);
    } else if constexpr (Spec::rotates_q) {
      write_heads<true>(at, p.rotary.q, p.rotary.q_out, p.rotary.heads_q, item - items_k - items_v);
    }
  }

 protected:
  struct Token {
    const Params& p;
    int index;
    TokenPlace place;
  };

  // This thread's token and its item of it. False if there is none.
  FLASHJIT_FN static bool find_item(const Params& p, i64& token, u32& item) {
    item = ctaid_y() * (Config::num_warps * 32) + tid_x();
    const u32 of_block = item * p.items_inverse >> 16;
    item -= of_block * p.items;
    token = i64{ctaid_x()} * p.tokens_of_block + of_block;
    return of_block < p.tokens_of_block && item < p.items && token < p.tokens;
  }

  // Where a column of K or Q, as RowItems counts them, lies in the row.
  FLASHJIT_FN static int place_of(int column) {
    if (Spec::rotary_first == 0) return column;
    return column + Spec::rotary_first - (column < Spec::head_dim - Spec::rotary_first ? 0 : Spec::head_dim);
  }

  FLASHJIT_FN static u32 items_of_heads(u32 heads) {
    return (heads + heads_of_item - 1) / heads_of_item * of_k.items;
  }

  // Rows of K, or of Q: the same columns of a few heads, whose angles are the same. The loads need not wait
  // for the token's place.
  template <bool is_q>
  FLASHJIT_FN static void write_heads(Token at, const TensorView& from, const TensorView& to, u32 heads,
                                      u32 item) {
    constexpr RowItems items = of_k;
    constexpr u32 of_row = items.items;
    const u32 head = item / of_row * heads_of_item;
    const int first = items.first(static_cast<int>(item % of_row)),
              second = items.second(static_cast<int>(item % of_row));
    const bool has_second = second < Spec::head_dim;
    PieceK a[heads_of_item], b[heads_of_item];
#pragma unroll
    for (u32 i = 0; i < heads_of_item; ++i) {
      if (head + i >= heads) continue;
      const Element* const row =
          static_cast<const Element*>(from.data) + from.offset(at.place.entry, at.place.row, head + i);
      load<is_q>(a[i], row + place_of(first));
      if (has_second) load<is_q>(b[i], row + place_of(second));
    }
    const i64 given = given_position(at);
    find_in_cache<Spec::varlen>(at.p, at.index, at.place);
    if constexpr (rotates)
      rotate(at.p, at.p.rotary.positions ? given : at.place.position, first, second, a, b);
    if (is_q ? !at.place.in_batch : !is_in_cache(at.p, at.place)) return;
    const i64 page = is_q ? at.place.entry : at.place.page,
              page_row = is_q ? at.place.row : at.place.page_row;
#pragma unroll
    for (u32 i = 0; i < heads_of_item; ++i) {
      if (head + i >= heads) continue;
      Element* const row = static_cast<Element*>(to.data) + to.offset(page, page_row, head + i);
      a[i].store(row + place_of(first));
      if (has_second) b[i].store(row + place_of(second));
    }
  }
  // Q may be rotated in place.
  template <bool is_q>
  FLASHJIT_FN static void load(PieceK& piece, const Element* from) {
    if constexpr (is_q)
      piece.load(from);
    else
      piece.load_lasting(from);
  }

  FLASHJIT_FN static void copy_v(Token at, u32 item) {
    constexpr RowItems items = of_v;
    constexpr u32 of_row = items.items;
    const u32 head = item / of_row;
    const int first = items.first(static_cast<int>(item % of_row)),
              second = items.second(static_cast<int>(item % of_row));
    const bool has_second = second < Spec::head_dim_v;
    const TensorView &from = at.p.v_new, &to = at.p.v;
    const Element* const row =
        static_cast<const Element*>(from.data) + from.offset(at.place.entry, at.place.row, head);
    RowPiece<Element, items.columns> a, b;
    a.load_lasting(row + first);
    if (has_second) b.load_lasting(row + second);
    find_in_cache<Spec::varlen>(at.p, at.index, at.place);
    if (!is_in_cache(at.p, at.place)) return;
    Element* const out = static_cast<Element*>(to.data) + to.offset(at.place.page, at.place.page_row, head);
    a.store(out + first);
    if (has_second) b.store(out + second);
  }

  // Loaded before the place is known, so that both loads are in flight at once.
  FLASHJIT_FN static i64 given_position(const Token& at) {
    if constexpr (rotates)
      if (at.p.rotary.positions) return at.p.rotary.positions[at.index];
    return 0;
  }

  template <class Piece>
  FLASHJIT_FN static void rotate(const Params& p, i64 position, int first, int second,
                                 Piece (&a)[heads_of_item], Piece (&b)[heads_of_item]) {
    if (first >= dim) return;  // both pieces are beyond the rotated columns
    if constexpr (halves) {
      float cosines[columns], sines[columns];
      angles(p, position, first, cosines, sines);
#pragma unroll
      for (int i = 0; i < heads_of_item; ++i) {
        float rotated_a[columns], rotated_b[columns];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          const float x = a[i][c], y = b[i][c];
          rotated_a[c] = x * cosines[c] - y * sines[c];
          rotated_b[c] = x * sines[c] + y * cosines[c];
        }
        a[i].set(rotated_a);
        b[i].set(rotated_b);
      }
    } else {
      rotate_inside(p, position, first, a);
      if (second < dim) rotate_inside(p, position, second, b);
    }
  }

  // Neighbours are pairs.
  template <class Piece>
  FLASHJIT_FN static void rotate_inside(const Params& p, i64 position, int column,
                                        Piece (&pieces)[heads_of_item]) {
    float cosines[columns / 2], sines[columns / 2];
    angles(p, position, column / 2, cosines, sines);
#pragma unroll
    for (int i = 0; i < heads_of_item; ++i) {
      float rotated[columns];
#pragma unroll
      for (int c = 0; c < columns; c += 2) {
        const float x = pieces[i][c], y = pieces[i][c + 1];
        rotated[c] = x * cosines[c / 2] - y * sines[c / 2];
        rotated[c + 1] = x * sines[c / 2] + y * cosines[c / 2];
      }
      pieces[i].set(rotated);
    }
  }

  // The angles of consecutive pairs.
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

  // The two upper bits of the angle and an eighth of a turn say which quarter is nearest.
  FLASHJIT_FN static void cosine_and_sine(u32 angle, float& cosine, float& sine) {
    const u32 shifted = angle + 0x20000000u, sign = 0x80000000u;
    const float r =
        static_cast<float>(static_cast<int>((shifted & 0x3fffffffu) - 0x20000000u)) * rest_to_radians;
    const float s = sine_of_rest(r), c = cosine_of_rest(r);
    const bool swaps = shifted & 0x40000000u;
    cosine = __uint_as_float(__float_as_uint(swaps ? s : c) ^ ((shifted + 0x40000000u) & sign));
    sine = __uint_as_float(__float_as_uint(swaps ? c : s) ^ (shifted & sign));
  }
};

template <class Spec, class Config>
FLASHJIT_FN void append(const typename Append<Spec, Config>::Params& params) {
  Append<Spec, Config>::run(params);
}

}  // namespace flashjit::device
