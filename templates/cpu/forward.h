// Forward attention on a CPU: flash attention (Dao et al. 2022: online softmax over key blocks) for tiles of
// block_m query rows of one head. A tile converts each block of K and V once, for all its rows, into scratch;
// each unit of rows then takes scores, softmax and the product with V in turn (see tile.h).
#pragma once

#include "cpu/tile.h"

namespace flashjit::device {

template <class Spec, class Config>
struct ForwardTile {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;
  using Products = typename Config::Products;
  using Operand = typename Products::Operand;
  static constexpr int vectors = Products::vectors, unit_rows = vectors * lanes;
  static constexpr int units = ceil_div(block_m, unit_rows);
  static constexpr int q_unit = Products::q_unit, o_unit = Products::o_rows * unit_rows;
  static constexpr int keys_whole = Products::keys_whole;
  static constexpr int s_block = round_up(block_n, keys_whole) * unit_rows;

  // Scratch, in this order.
  Operand* q;                // [units][q_unit]
  float* o;                  // [units][o_unit]
  RowState<vectors>* state;  // [units]
  Operand* k;                // [k_block]
  Operand* v;                // [v_block]
  float* s;                  // [score_blocks][block_n, in whole groups of keys][unit_rows]
  float* alpha;              // [unit_rows]
  u32 *multiplier, *addend;  // [units][unit_rows]; these and the next with dropout only
  u32* column;               // [block_n + keys_whole]

  FLASHJIT_FN explicit ForwardTile(void* scratch) {
    q = static_cast<Operand*>(scratch);
    o = reinterpret_cast<float*>(q + units * q_unit);
    state = reinterpret_cast<RowState<vectors>*>(o + units * o_unit);
    k = reinterpret_cast<Operand*>(state + units);
    v = k + Products::k_block;
    s = reinterpret_cast<float*>(v + Products::v_block);
    alpha = s + Products::score_blocks * s_block;
    multiplier = reinterpret_cast<u32*>(alpha + unit_rows);
    addend = multiplier + units * unit_rows;
    column = addend + units * unit_rows;
  }

  // `tile` is rows of one problem, at most block_m; some or all of them may be padding.
  FLASHJIT_FN void run(const ForwardParams& params, const Problem& problem, Span tile) const {
    const Mask mask(params, problem);
    const Span valid = {tile.begin, min(tile.end, problem.seqlen_q)};
    const float scale = params.softmax_scale * log2_e;
    const Element* const k_rows = static_cast<const Element*>(params.k.data) + problem.k_offset;
    const Element* const v_rows = static_cast<const Element*>(params.v.data) + problem.v_offset;
    begin(params, problem, tile);
    Products products;
    if constexpr (Spec::dropout) make_row_words(params, problem, tile);

    BlockWalk<Keys, Mask> walk(mask, valid, block_n);
    for (Block block; walk.next(block);) {
      const Span keys = intersect(mask.hull(Keys{}, valid), block_span(block.index, block_n));
      const i64 k_stride = params.k.row_stride, v_stride = params.v.row_stride;
      Products::pack_k(k_rows + keys.begin * k_stride, k_stride, keys.size(), k);
      const bool finite = Products::pack_v(v_rows + keys.begin * v_stride, v_stride, keys.size(), v);
      if constexpr (Spec::dropout) make_column_words(params, problem, keys);
      // Scores of the next unit are taken while the softmax of one is, where that is of use.
      UnitWork now = next_unit(mask, tile, valid, keys, 0);
      if (!now.kept.empty()) products.scores(k, q + now.unit * q_unit, now.s, now.used);
      products.finish();
      while (!now.kept.empty()) {
        UnitWork next = next_unit(mask, tile, valid, keys, now.unit + 1);
        next.s = s + (now.s - s + s_block) % (Products::score_blocks * s_block);
        if (Products::ahead && !next.kept.empty())
          products.scores(k, q + next.unit * q_unit, next.s, next.used);
        const Span seen = {now.kept.begin - keys.begin, now.kept.end - keys.begin};  // of the block
        const bool whole = mask.whole(now.rows, now.kept);
        if (!whole) apply_mask<vectors>(mask, now.s + seen.begin * unit_rows, now.rows, now.kept);
        leave_out<vectors>(now.s, now.used.begin, seen.begin);
        leave_out<vectors>(now.s, seen.end, now.used.end);
        float* const p = now.s + now.used.begin * unit_rows;
        if constexpr (Spec::dropout) {
          softmax<Products>(p, scale, state[now.unit], alpha, now.used.size(),
                            Drop{multiplier + now.unit * unit_rows, addend + now.unit * unit_rows,
                                 column + keys.begin % block_n + now.used.begin, params.dropout.below},
                            products);
        } else {
          softmax<Products>(p, scale, state[now.unit], alpha, now.used.size(), KeepAll{}, products);
        }
        products.finish();
        const bool weighted = finite || (whole && now.used.size() == seen.size());
        float* const sums = o + now.unit * o_unit;
        products.add_product(v, p, alpha, sums, weighted ? now.used : Span{});
        if (!weighted) Products::add_weighted(v, p, sums, now.used);
        if (!Products::ahead && !next.kept.empty())
          products.scores(k, q + next.unit * q_unit, next.s, next.used);
        now = next;
      }
      products.finish();
    }
    if constexpr (Mask::padding)
      for (int row = max(valid.size(), 0); row < tile.size(); ++row)
        state[row / unit_rows].sum[row % unit_rows] = 0;
    end(params, problem, tile);
  }

  // What a unit has to do with a block of keys.
  struct UnitWork {
    int unit;
    Span rows, kept, used;  // used: kept, in whole groups, counted from the block's first key
    float* s;
  };
  // The first unit from `unit` on that the block concerns; nothing kept: none.
  FLASHJIT_FN UnitWork next_unit(const Mask& mask, Span tile, Span valid, Span keys, int unit) const {
    for (; unit * unit_rows < valid.size(); ++unit) {
      const int row = tile.begin + unit * unit_rows;
      const Span rows = {row, min(row + unit_rows, valid.end)};
      if (!touches(mask, rows, keys)) continue;
      const Span kept = intersect(mask.hull(Keys{}, rows), keys);
      const int first = kept.begin - keys.begin, end = kept.end - keys.begin;
      return {unit, rows, kept, {first / keys_whole * keys_whole, round_up(end, keys_whole)}, s};
    }
    return {unit, {}, {}, {}, s};
  }

  // Q^T, by way of the room for K; O and the state of the softmax. Lanes beyond the tile's last row hold
  // whatever was packed before, and nothing of theirs is written.
  __attribute__((noinline)) void begin(const ForwardParams& params, const Problem& problem, Span tile) const {
    const i64 stride = params.q.row_stride;
    const Element* rows = static_cast<const Element*>(params.q.data) + problem.q_offset + tile.begin * stride;
    for (int unit = 0; unit * unit_rows < tile.size(); ++unit) {
      Products::pack_q(rows, stride, tile.size() - unit * unit_rows, k, q + unit * q_unit);
      rows += unit_rows * stride;
      for (int i = 0; i < o_unit; i += lanes) store(o + unit * o_unit + i, Vec{});
      for (int i = 0; i < unit_rows; i += lanes) {
        store(state[unit].maximum + i, splat(minus_infinity));
        store(state[unit].sum + i, Vec{});
      }
    }
  }

  __attribute__((noinline)) void make_row_words(const ForwardParams& params, const Problem& problem,
                                                Span tile) const {
    const Words key = dropout_key(params.dropout);
    for (int i = 0; i < tile.size(); ++i) {
      const RowWords row = dropout_row_words(key, tile.begin + i, problem.head_q, problem.batch);
      multiplier[i] = row.multiplier;
      addend[i] = row.addend;
    }
  }
  // Where they lie in their block: groups of four that hold any of `keys`.
  __attribute__((noinline)) void make_column_words(const ForwardParams& params, const Problem& problem,
                                                   Span keys) const {
    const Words key = dropout_key(params.dropout);
    for (int group = keys.begin / 4; group * 4 < keys.end; ++group) {
      const Words words = dropout_column_words(key, group, problem.batch);
      for (int i = 0; i < 4; ++i) column[group * 4 % block_n + i] = words.x[i];
    }
  }

  // O, by way of the room for V, and lse.
  __attribute__((noinline)) void end(const ForwardParams& params, const Problem& problem, Span tile) const {
    const i64 stride = params.o.row_stride;
    float* const room = reinterpret_cast<float*>(v);
    const float scale_o = Spec::dropout ? params.dropout.scale : 1.0f;
    Element* rows = static_cast<Element*>(params.o.data) + problem.o_offset + tile.begin * stride;
    for (int row = 0; row < tile.size(); row += 8, rows += 8 * stride) {
      const int unit = row / unit_rows, lane = row % unit_rows;
      transpose({o + unit * o_unit + lane, unit_rows, 8 * unit_rows}, {room, head_dim_v, 8}, head_dim_v / 8);
      unpack(room, head_dim_v, scale_o, state[unit].sum + lane, rows, stride, min(8, tile.size() - row));
    }
    if constexpr (Spec::lse) {
      const i64 lse_stride = params.lse.row_stride;
      float* lse = static_cast<float*>(params.lse.data) + problem.lse_offset + tile.begin * lse_stride;
      for (int row = 0; row < tile.size(); row += unit_rows, lse += unit_rows * lse_stride)
        unpack_lse(state[row / unit_rows], lse, lse_stride, min(unit_rows, tile.size() - row));
    }
  }
};

// Tiles [begin, end) of batch * num_heads_q * ceil(seqlen_q / block_m): heads outermost, for their K and V to
// stay in shared caches, and within a head the last rows first, which causal masks make the longest.
template <class Spec, class Config>
FLASHJIT_FN void forward(const ForwardParams& params, i64 begin, i64 end, void* scratch) {
  const ForwardTile<Spec, Config> tile(scratch);
  const int blocks = ceil_div(params.seqlen_q, Config::block_m);
  for (i64 t = begin; t < end; ++t) {
    const int head = static_cast<int>(t / blocks % params.num_heads_q);
    const int batch = static_cast<int>(t / blocks / params.num_heads_q);
    const int row = static_cast<int>(blocks - 1 - t % blocks) * Config::block_m;
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding>(params, batch, head);
    const Span rows = {row, min(row + Config::block_m, problem.rows)};
    if (!rows.empty()) tile.run(params, problem, rows);
  }
}

}  // namespace flashjit::device
