// Forward attention on a CPU: flash attention (Dao et al. 2022: online softmax over key blocks) for tiles of
// at most block_m query rows, of one head or of some that share their keys. A tile converts each block of K
// and V once, for all its rows, into scratch; each unit of rows then takes scores, softmax and the product
// with V in turn (see tile.h). Where rows make too few tiles for the threads, each tile is worked on in parts
// of its keys, and whoever ends last adds them up (as in Flash-Decoding, Dao et al. 2023).
#pragma once

#include "cpu/tile.h"

namespace flashjit::device {

template <class Spec, class Config>
struct ForwardTile {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v;
  static constexpr int block_m = Config::block_m, block_n = Config::block_n;
  static constexpr int k_row = cpu_packed_row(head_dim), v_row = cpu_packed_row(head_dim_v);
  using Element = typename Spec::Element;
  using Mask = typename Spec::Mask;

  // Scratch, in this order. What belongs to rows lies unit after unit.
  float* q;                  // [head_dim][unit_rows]
  float* o;                  // [head_dim_v][unit_rows]
  float* state;              // RowState
  float* k;                  // [block_n][k_row]
  float* v;                  // [block_n][v_row]
  float* s;                  // [block_n][unit_rows]
  float* alpha;              // [unit_rows]
  u32 *multiplier, *addend;  // [block_m]; these and the next with dropout only
  u32* column;               // [block_n]

  FLASHJIT_FN explicit ForwardTile(void* scratch) {
    q = static_cast<float*>(scratch);
    o = q + block_m * head_dim;
    state = o + block_m * head_dim_v;
    k = state + block_m * cpu_row_state;
    v = k + block_n * k_row;
    s = v + block_n * v_row;
    alpha = s + block_n * cpu_unit_rows;
    multiplier = reinterpret_cast<u32*>(alpha + cpu_unit_rows);
    addend = multiplier + block_m;
    column = addend + block_m;
  }

  // `rows`, at most block_m, are of one problem; some or all of them may be padding. Of the keys that they
  // see, one of params.key_parts.
  FLASHJIT_FN void run(const ForwardParams& params, const Problem& problem, Span rows, int part) const {
    const Mask mask(params, problem);
    const Span valid = valid_rows(params, problem, rows);
    const Span across = positions(params, valid), hull = mask.hull(Keys{}, across);
    const Element* const k_rows = static_cast<const Element*>(params.k.data) + problem.k_offset;
    const Element* const v_rows = static_cast<const Element*>(params.v.data) + problem.v_offset;
    begin(params, problem, rows);
    if constexpr (Spec::dropout) make_row_words(params, problem, rows);

    BlockWalk<Keys, Mask> walk(mask, across, block_n, part_of(hull, part, params.key_parts));
    for (Block block; walk.next(block);) {
      const Span keys = intersect(hull, block_span(block.index, block_n));
      pack(k_rows + keys.begin * params.k.row_stride, params.k.row_stride, keys.size(), head_dim, k, k_row);
      const bool finite = pack(v_rows + keys.begin * params.v.row_stride, params.v.row_stride, keys.size(),
                               head_dim_v, v, v_row);
      if constexpr (Spec::dropout) make_column_words(params, problem, keys);
      for_each_unit(params, rows, [&](int row, int unit_rows) {
        const Span unit = {rows.begin + row, min(rows.begin + row + unit_rows, valid.end)};
        if (touches(mask, positions(params, unit), keys))
          attend(params, mask, row, unit_rows, unit, keys, finite);
      });
    }
  }

  // The unit at `row` of the tile, whose valid rows are `rows`, and a block of keys.
  __attribute__((noinline)) void attend(const ForwardParams& params, const Mask& mask, int row, int unit_rows,
                                        Span rows, Span keys, bool finite) const {
    const float scale = params.softmax_scale * log2_e;
    const Span across = positions(params, rows), kept = intersect(mask.hull(Keys{}, across), keys);
    const int skipped = kept.begin - keys.begin, first = skipped / step * step;
    float* const p = s + skipped * unit_rows;
    multiply(unit_rows, {k + first * k_row, k_row, 1}, q + row * head_dim, head_dim, nullptr,
             s + first * unit_rows, kept.end - keys.begin - first);
    const bool whole = mask.whole(across, kept);
    if (!whole) apply_mask(unit_rows, mask, p, rows, kept, params.packed_heads);
    if constexpr (Spec::dropout) {
      softmax(unit_rows, p, scale, row_state(state, row, unit_rows), alpha, kept.size(),
              Drop{multiplier + row, addend + row, column + kept.begin % block_n, params.dropout.below});
    } else {
      softmax(unit_rows, p, scale, row_state(state, row, unit_rows), alpha, kept.size(), KeepAll{});
    }
    float* const unit_o = o + row * head_dim_v;
    const Matrix v_transposed = {v + skipped * v_row, 1, v_row};
    const bool weighted = whole || finite;
    multiply(unit_rows, v_transposed, p, weighted ? kept.size() : 0, alpha, unit_o, head_dim_v);
    if (!weighted) add_weighted(unit_rows, v_transposed, p, kept.size(), unit_o, head_dim_v);
  }

  // Q^T, by way of the room for K; O and the state of the softmax. Lanes beyond the tile's last row hold
  // whatever was packed before, and nothing of theirs is written.
  __attribute__((noinline)) void begin(const ForwardParams& params, const Problem& problem, Span tile) const {
    const Element* const rows = static_cast<const Element*>(params.q.data) + problem.q_offset;
    for_each_unit(params, tile, [&](int row, int unit_rows) {
      for (int lane = 0; lane < unit_rows; lane += 8) {
        const int first = tile.begin + row + lane;
        for_each_run(params, {first, min(first + 8, tile.end)}, [&](int i, int count) {
          pack(rows + offset(params, params.q, i), params.q.row_stride, count, head_dim,
               k + (i - first) * k_row, k_row);
        });
        transpose({k, k_row, 8}, {q + row * head_dim + lane, unit_rows, 8 * unit_rows}, head_dim / 8);
      }
      for (int i = 0; i < unit_rows * head_dim_v; i += lanes) store(o + row * head_dim_v + i, Vec{});
      const RowState softmax = row_state(state, row, unit_rows);
      for (int i = 0; i < unit_rows; i += lanes) {
        store(softmax.maximum + i, splat(minus_infinity));
        store(softmax.sum + i, Vec{});
      }
    });
  }

  __attribute__((noinline)) void make_row_words(const ForwardParams& params, const Problem& problem,
                                                Span tile) const {
    const Words key = dropout_key(params.dropout);
    for (int i = 0; i < tile.size(); ++i) {
      const int row = tile.begin + i, head = problem.head_q + row % params.packed_heads;
      const RowWords words = dropout_row_words(key, row / params.packed_heads, head, problem.batch);
      multiplier[i] = words.multiplier;
      addend[i] = words.addend;
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

  // Leaves what this part gave beside the others of its tile. True if they are all there now; then their sum
  // is here, always added up in the same order.
  __attribute__((noinline)) bool collect(const ForwardParams& params, Span tile, i64 index, int part) const {
    const int size_o = params.tile_rows * head_dim_v, size = size_o + params.tile_rows * cpu_row_state;
    float* const parts = params.partials + index * params.key_parts * size;
    const int rows = round_up(tile.size(), lanes);
    copy(parts + part * size, o, rows * head_dim_v);
    copy(parts + part * size + size_o, state, rows * cpu_row_state);
    if (__atomic_add_fetch(params.arrived + index, 1u, __ATOMIC_ACQ_REL) !=
        static_cast<u32>(params.key_parts))
      return false;
    copy(o, parts, rows * head_dim_v);
    copy(state, parts + size_o, rows * cpu_row_state);
    for (int other = 1; other < params.key_parts; ++other) {
      float* const from = parts + other * size;
      for_each_unit(params, tile, [&](int row, int unit_rows) {
        merge(unit_rows, row_state(state, row, unit_rows), o + row * head_dim_v,
              row_state(from + size_o, row, unit_rows), from + row * head_dim_v, head_dim_v);
      });
    }
    return true;
  }

  // O, by way of the room for V, and lse.
  __attribute__((noinline)) void end(const ForwardParams& params, const Problem& problem, Span tile) const {
    const float scale_o = Spec::dropout ? params.dropout.scale : 1.0f;
    Element* const rows = static_cast<Element*>(params.o.data) + problem.o_offset;
    float* const lse = static_cast<float*>(params.lse.data) + problem.lse_offset;
    const Span valid = valid_rows(params, problem, tile);
    for_each_unit(params, tile, [&](int row, int unit_rows) {
      const int first = tile.begin + row, last = min(first + unit_rows, tile.end);
      const RowState softmax = row_state(state, row, unit_rows);
      if constexpr (Mask::padding)
        for (int i = max(valid.end, first); i < last; ++i) softmax.sum[i - first] = 0;
      for (int i = first; i < last; i += 8) {
        transpose({o + row * head_dim_v + i - first, unit_rows, 8 * unit_rows}, {v, head_dim_v, 8},
                  head_dim_v / 8);
        for_each_run(params, {i, min(i + 8, last)}, [&](int j, int count) {
          unpack(v + (j - i) * head_dim_v, head_dim_v, scale_o, softmax.sum + j - first,
                 rows + offset(params, params.o, j), params.o.row_stride, count);
        });
      }
      if constexpr (Spec::lse) {
        make_lse(unit_rows, softmax);
        for (int i = first; i < last; ++i) lse[offset(params, params.lse, i)] = softmax.maximum[i - first];
      }
    });
  }

 private:
  // Rows of a tile are those of packed_heads heads in turn: row r is position r / packed_heads.
  FLASHJIT_FN static Span positions(const ForwardParams& params, Span rows) {
    if (rows.empty()) return {0, 0};
    return {rows.begin / params.packed_heads, (rows.end - 1) / params.packed_heads + 1};
  }
  FLASHJIT_FN static i64 offset(const ForwardParams& params, const TensorView& tensor, int row) {
    return row / params.packed_heads * tensor.row_stride + row % params.packed_heads * tensor.head_stride;
  }
  // Calls body(first, count) for rows that are a row_stride apart.
  template <class Body>
  FLASHJIT_FN static void for_each_run(const ForwardParams& params, Span rows, Body body) {
    const int count = params.packed_heads == 1 ? rows.size() : 1;
    for (int row = rows.begin; row < rows.end; row += count) body(row, count);
  }
  FLASHJIT_FN static Span valid_rows(const ForwardParams& params, const Problem& problem, Span rows) {
    return {rows.begin, min(rows.end, problem.seqlen_q * params.packed_heads)};
  }
  // Calls body(row of the tile, unit_rows) for its units, none of which lies across two lists of the mask:
  // what one of them sees would be computed for the other.
  template <class Body>
  FLASHJIT_FN static void for_each_unit(const ForwardParams& params, Span tile, Body body) {
    const int list_rows = Mask::list_rows * params.packed_heads;
    for (int row = tile.begin; row < tile.end;) {
      const int end = list_rows > 0 ? min(tile.end, round_up(row + 1, list_rows)) : tile.end;
      const int unit_rows = unit_vectors(end - row) * lanes;
      body(row - tile.begin, unit_rows);
      row += unit_rows;
    }
  }
  FLASHJIT_FN static RowState row_state(float* states, int row, int unit_rows) {
    return {states + row * cpu_row_state, states + row * cpu_row_state + unit_rows};
  }
  // Whole blocks, dealt out evenly.
  FLASHJIT_FN static Span part_of(Span keys, int part, int parts) {
    if (keys.empty()) return keys;
    const int first = max(keys.begin, 0) / block_n;
    const i64 blocks = ceil_div(keys.end, block_n) - first;
    return {(first + static_cast<int>(blocks * part / parts)) * block_n,
            (first + static_cast<int>(blocks * (part + 1) / parts)) * block_n};
  }
};

// Items [begin, end) of batch * heads (packed ones count as one) * tiles of a head * key_parts: heads
// outermost, for their K and V to stay in shared caches, and within a head the last rows first, which causal
// masks make the longest.
template <class Spec, class Config>
FLASHJIT_FN void forward(const ForwardParams& params, i64 begin, i64 end, void* scratch) {
  const ForwardTile<Spec, Config> tile(scratch);
  const int heads = params.num_heads_q / params.packed_heads;
  const int tiles = ceil_div(params.seqlen_q * params.packed_heads, params.tile_rows);
  for (i64 item = begin; item < end; ++item) {
    const int part = static_cast<int>(item % params.key_parts);
    const i64 index = item / params.key_parts;
    const int head = static_cast<int>(index / tiles % heads) * params.packed_heads;
    const int batch = static_cast<int>(index / tiles / heads);
    const int row = static_cast<int>(tiles - 1 - index % tiles) * params.tile_rows;
    const Problem problem = make_problem<Spec::varlen, Spec::Mask::padding>(params, batch, head);
    const Span rows = {row, min(row + params.tile_rows, problem.rows * params.packed_heads)};
    if (rows.empty()) continue;
    tile.run(params, problem, rows, part);
    if (params.key_parts == 1 || tile.collect(params, rows, index, part)) tile.end(params, problem, rows);
  }
}

}  // namespace flashjit::device
