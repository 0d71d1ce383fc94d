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
  static constexpr int units = ceil_div(block_m, unit_rows);
  static constexpr int v_group = cpu_v_group(block_n);
  using Element = typename Spec::Element;

  // Scratch, in this order.
  float* q;         // [units][head_dim][unit_rows]
  float* o;         // [units][head_dim_v][unit_rows]
  RowState* state;  // [units]
  float* k;         // [block_n][head_dim]
  float* v;         // [head_dim_v / 8][v_group]: [block_n][8]
  float* s;         // [block_n][unit_rows]
  float* alpha;     // [unit_rows]

  FLASHJIT_FN explicit ForwardTile(void* scratch) {
    q = static_cast<float*>(scratch);
    o = q + units * head_dim * unit_rows;
    state = reinterpret_cast<RowState*>(o + units * head_dim_v * unit_rows);
    k = reinterpret_cast<float*>(state + units);
    v = k + block_n * head_dim;
    s = v + head_dim_v / 8 * v_group;
    alpha = s + block_n * unit_rows;
  }

  // Rows [row, row + count) of a problem.
  FLASHJIT_FN void run(const ForwardParams& params, const Problem& problem, int row, int count) const {
    const typename Spec::Mask mask(params, problem);
    const Span tile{row, row + count};
    begin(params, problem, tile);

    BlockWalk<Keys, typename Spec::Mask> walk(mask, tile, block_n);
    for (Block block; walk.next(block);) {
      const int first_key = block.index * block_n;
      const Span keys = intersect(mask.hull(Keys{}, tile), block_span(block.index, block_n));
      pack_block(params, problem, first_key, keys);
      for (int unit = 0; unit * unit_rows < count; ++unit) {
        const Span rows = intersect({row + unit * unit_rows, row + (unit + 1) * unit_rows}, tile);
        const Span kept = intersect(mask.hull(Keys{}, rows), keys);
        if (kept.empty()) continue;
        const Span local{kept.begin - first_key, kept.end - first_key};
        scores<head_dim>(k, q + unit * head_dim * unit_rows, s, local);
        if (!mask.whole(rows, kept)) apply_mask(mask, s, rows, first_key, local);
        softmax(s, params.softmax_scale * log2_e, state[unit], alpha, local);
        accumulate<head_dim_v, v_group>(v, s, alpha, o + unit * head_dim_v * unit_rows, local);
      }
    }
    end(params, problem, tile);
  }

  FLASHJIT_FN void begin(const ForwardParams& params, const Problem& problem, Span tile) const {
    const Element* rows = static_cast<const Element*>(params.q.data) + problem.q_offset;
    for (int unit = 0; unit * unit_rows < tile.size(); ++unit) {
      const int first = unit * unit_rows;
      pack_queries<head_dim>(rows + (tile.begin + first) * params.q.row_stride, params.q.row_stride,
                             tile.size() - first, q + first * head_dim);
      for (int i = 0; i < head_dim_v * unit_rows; i += lanes) store(o + first * head_dim_v + i, Vec{});
      for (int i = 0; i < unit_rows; i += lanes) {
        store(state[unit].maximum + i, splat(minus_infinity));
        store(state[unit].sum + i, Vec{});
      }
    }
  }

  FLASHJIT_FN void pack_block(const ForwardParams& params, const Problem& problem, int first_key,
                              Span keys) const {
    const int skipped = keys.begin - first_key;
    pack<head_dim, head_dim, 8>(
        static_cast<const Element*>(params.k.data) + problem.k_offset + keys.begin * params.k.row_stride,
        params.k.row_stride, keys.size(), k + skipped * head_dim);
    pack<head_dim_v, 8, v_group>(
        static_cast<const Element*>(params.v.data) + problem.v_offset + keys.begin * params.v.row_stride,
        params.v.row_stride, keys.size(), v + skipped * 8);
  }

  FLASHJIT_FN void end(const ForwardParams& params, const Problem& problem, Span tile) const {
    Element* rows = static_cast<Element*>(params.o.data) + problem.o_offset;
    for (int unit = 0; unit * unit_rows < tile.size(); ++unit) {
      const int first = unit * unit_rows;
      const int count = min(unit_rows, tile.size() - first);
      unpack_output<head_dim_v>(o + first * head_dim_v, state[unit],
                                rows + (tile.begin + first) * params.o.row_stride, params.o.row_stride,
                                count);
      if constexpr (Spec::lse)
        unpack_lse(state[unit],
                   static_cast<float*>(params.lse.data) + problem.lse_offset +
                       (tile.begin + first) * params.lse.row_stride,
                   params.lse.row_stride, count);
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
    const Problem problem = make_problem<Spec::varlen>(params, batch, head);
    const int count = min(Config::block_m, problem.seqlen_q - row);
    if (count > 0) tile.run(params, problem, row, count);
  }
}

}  // namespace flashjit::device
