// Backward by vectors of float32, for every dtype. The five products are one routine:
//   S^T = K Q^T, dP^T = V dO^T       lanes are rows
//   dV += P^T dO, dK += dS^T Q       lanes are columns
//   dQ += dS K                       lanes are columns
#pragma once

#include "cpu/backward.h"
#include "cpu/vector_products.h"

namespace flashjit::device {

// Rows of a unit.
constexpr int backward_unit = 3 * lanes;
static_assert(backward_unit <= cpu_unit_rows);

// Strides of m(i, k) at data[i * i + k * k], of x[k] and of out[i]. They are constants: adding them to
// pointers would take the multiply-adds' place in the processor.
template <int i_, int k_, int x_, int out_>
struct Strides {
  static constexpr int i = i_, k = k_, x = x_, out = out_;
};

// Terms of a round of the loop. Sums are as short as 48 terms, and a loop of so many rounds costs more:
// probably the processor mispredicts its end.
constexpr int unrolled = 4;

// out[i] (+)= sum over k < depth of m(i, k) * x[k], for i < count, a multiple of 8. `add`: out is added to.
// depth: a multiple of `unrolled`.
template <int vectors, class Strides, bool add>
FLASHJIT_FN void multiply_rows(const float* m, const float* x, int depth, float* out, int count) {
  constexpr int steps = vectors > 1 ? step : 8;
  for (; count > 0; count -= steps, m += steps * Strides::i, out += steps * Strides::out) {
    Rows<vectors> sums[steps] = {};
    if constexpr (add) {
#pragma unroll
      for (int i = 0; i < steps; ++i) sums[i] = load_rows<vectors>(out + i * Strides::out);
    }
    const float *column = m, *row = x, *const end = x + depth * Strides::x;
#pragma nounroll
    for (; row < end; column += unrolled * Strides::k, row += unrolled * Strides::x) {
#pragma unroll
      for (int k = 0; k < unrolled; ++k) {
        const auto r = load_rows<vectors>(row + k * Strides::x);
#pragma unroll
        for (int i = 0; i < steps; ++i) {
          const Vec by = splat(column[i * Strides::i + k * Strides::k]);
#pragma unroll
          for (int j = 0; j < vectors; ++j) sums[i].v[j] = fma(by, r.v[j], sums[i].v[j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) store(out + i * Strides::out, sums[i]);
  }
}
// The same for `columns` columns of x and out, rounded up to whole vectors, by threes and twos.
template <int columns, class Strides, bool add>
__attribute__((noinline)) void multiply(const float* m, const float* x, int depth, float* out, int count) {
  constexpr int vectors = ceil_div(columns, lanes);
  constexpr int twos = vectors == 1       ? 0
                       : vectors % 3 == 0 ? 0
                                          : 3 - vectors % 3,
                threes = (vectors - 2 * twos) / 3;
  if constexpr (threes > 0)
    for (int i = 0; i < threes; ++i, x += 3 * lanes, out += 3 * lanes)
      multiply_rows<3, Strides, add>(m, x, depth, out, count);
  if constexpr (twos > 0)
    for (int i = 0; i < twos; ++i, x += 2 * lanes, out += 2 * lanes)
      multiply_rows<2, Strides, add>(m, x, depth, out, count);
  if constexpr (vectors == 1) multiply_rows<1, Strides, add>(m, x, depth, out, count);
}

// Adds the same sums without terms whose m is zero: NaN and infinity in x reach only results that give them a
// weight.
__attribute__((noinline)) inline void add_weighted(Matrix m, const float* x, int x_stride, int depth,
                                                   float* out, int out_stride, int count, int columns) {
  for (int i = 0; i < count; ++i)
    for (int k = 0; k < depth; ++k) {
      const float weight = m.data[i * m.i_stride + k * m.k_stride];
      if (weight == 0) continue;
      for (int c = 0; c < columns; c += lanes)
        store(out + i * out_stride + c,
              fma(splat(weight), load(x + k * x_stride + c), load(out + i * out_stride + c)));
    }
}
template <int columns, class Strides>
FLASHJIT_FN void add_product(bool finite, const float* m, const float* x, int depth, float* out, int count) {
  if (finite)
    multiply<columns, Strides, true>(m, x, depth, out, count);
  else
    add_weighted({m, Strides::i, Strides::k}, x, Strides::x, depth, out, Strides::out, count, columns);
}

// to[column][backward_unit] = from[row][stride]
__attribute__((noinline)) inline void transpose_rows(const float* from, int stride, int columns, float* to) {
  for (int row = 0; row < backward_unit; row += lanes)
    for (int column = 0; column < columns; column += 4) {
      WordVec v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[j] = gather_words(
            [&](int i) __attribute__((always_inline)) { return from + (row + 4 * i + j) * stride + column; });
      transpose4(v);
#pragma unroll
      for (int j = 0; j < 4; ++j) store(to + (column + j) * backward_unit + row, reinterpret_cast<Vec>(v[j]));
    }
}

template <class Spec, class Config>
struct VectorBackward {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v, block_n = Config::block_n;
  static constexpr int k_row = cpu_backward_packed_row(head_dim), v_row = cpu_backward_packed_row(head_dim_v);
  static constexpr int unit = backward_unit, step_n = cpu_backward_keys;
  static constexpr int dq_row = cpu_backward_row(head_dim);
  using Element = typename Spec::Element;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;
  using Gradient = GradientOf<Spec>;
  using Mask = typename Spec::Mask;

  // Scratch, in this order.
  float *k, *v, *dk, *dv;           // [block_n][k_row], [block_n][v_row], twice
  float *q, *d_o;                   // [unit][k_row], [unit][v_row]
  float *q_columns, *d_o_columns;   // [head_dim][unit], [head_dim_v][unit]
  float *p, *ds;                    // [step_n][unit]; scores, then weights; dO V^T, then dS
  float *offset, *maximum, *delta;  // [unit]
  u32 *multiplier, *addend;         // [unit]; with dropout only
  u32* column;                      // [block_n]; with dropout only
  float* raw;                       // [step_n][unit]; scores before formulas, if these have derivatives

  FLASHJIT_FN explicit VectorBackward(void* scratch) {
    float* next = static_cast<float*>(scratch);
    const auto take = [&](int floats) {
      float* const taken = next;
      next += floats;
      return taken;
    };
    k = take(block_n * k_row), v = take(block_n * v_row);
    dk = take(block_n * k_row), dv = take(block_n * v_row);
    q = take(unit * k_row), d_o = take(unit * v_row);
    q_columns = take(head_dim * unit), d_o_columns = take(head_dim_v * unit);
    p = take(step_n * unit), ds = take(step_n * unit);
    offset = take(unit), maximum = take(unit), delta = take(unit);
    multiplier = reinterpret_cast<u32*>(take(unit)), addend = reinterpret_cast<u32*>(take(unit));
    column = reinterpret_cast<u32*>(take(block_n));
    raw = next;
  }

  // Computes dK and dV of the keys from `first` on, of at most block_n, and adds to dQ.
  FLASHJIT_FN void run(const CpuBackwardParams& params, const Problem& slot, int first, float* sums) const {
    const int group = params.num_heads_q / params.num_heads_kv;
    const Problem any = problem_in<Spec>(params, slot, slot.head_q);
    const Span keys = {first, min(first + block_n, any.seqlen_k)};
    clear(dk, block_n * (k_row + v_row));  // dv follows
    if (!keys.empty()) {
      const bool finite = load(
          static_cast<const Element*>(params.k.data) + any.k_offset(params.k) + first * params.k.row_stride,
          params.k.row_stride, keys.size(), block_n, head_dim, k, k_row);
      load(static_cast<const Element*>(params.v.data) + any.k_offset(params.v) + first * params.v.row_stride,
           params.v.row_stride, keys.size(), block_n, head_dim_v, v, v_row);
      if constexpr (Spec::dropout) make_column_words<Spec>(params, slot.batch, keys, column);
      for (int head = slot.head_q; head < slot.head_q + group; ++head) {
        const Problem problem = problem_in<Spec>(params, slot, head);
        const Mask mask(params, problem);
        BlockWalk<Queries, Mask> walk(mask, keys, unit);
        for (Block block; walk.next(block);) {
          const Span rows = intersect(block_span(block.index, unit), {0, problem.seqlen_q});
          const Span kept = intersect(mask.hull(Keys{}, rows), keys);
          if (!rows.empty() && !kept.empty())
            add_unit(params, problem, mask, rows, kept, first, finite, sums);
        }
      }
    }
    write_keys(params, slot, first);
  }

  __attribute__((noinline)) void find_sums(const CpuBackwardParams& params, const Problem& problem,
                                           Span all_rows) const {
    const Mask mask(params, problem);
    alignas(64) float maxima[unit], sums[unit];
    for (int row = all_rows.begin; row < all_rows.end; row += unit) {
      const Span rows = {row, min(row + unit, all_rows.end)};
      for (int i = 0; i < unit; ++i) maxima[i] = minus_infinity, sums[i] = 0;
      load_q(params, problem, rows);
      const Span seen = intersect(mask.hull(Keys{}, rows), {0, problem.seqlen_k});
      for (int first = seen.begin / block_n * block_n; first < seen.end; first += block_n) {
        const Span keys = intersect({first, first + block_n}, {0, problem.seqlen_k});
        load(static_cast<const Element*>(params.k.data) + problem.k_offset(params.k) +
                 first * params.k.row_stride,
             params.k.row_stride, keys.size(), block_n, head_dim, k, k_row);
        const Span of_block = intersect(seen, keys);
        for (int step = of_block.begin / step_n * step_n; step < of_block.end; step += step_n) {
          const Span kept = intersect(of_block, {step, step + step_n});
          const int begin = kept.begin - kept.begin % 8, count = round_up(kept.end - begin, 8);
          if (!Mask::row_intervals && !touches(mask, rows, kept)) continue;
          make_scores(params, problem, mask, rows, kept, begin, count, first);
          add_scores(unit, Score::scale_log2(params), p, count, {maxima, sums});
        }
      }
      set_sums<Spec>(params, problem, workspace_row<Spec>(params, problem) + row, rows.size(),
                     {maxima, sums});
    }
  }

  // A group of dQ is [group][row].
  template <class To>
  FLASHJIT_FN static void write_dq(const float* sums, float scale, int count, To* dq, i64 stride) {
    for (int i = 0; i < count; ++i)
      write_row<Spec::batch_invariant>(sums + i * cpu_backward_row(head_dim), scale, head_dim,
                                       dq + i * stride);
  }

 private:
  // Converts `count` rows to floats; rows from there to `rows` become zeros. Returns whether all are finite.
  __attribute__((noinline)) static bool load(const Element* from, i64 stride, int count, int rows,
                                             int columns, float* to, int to_stride) {
    const bool finite = pack(StridedRows<Element>{from, stride}, count, columns, to, to_stride);
    clear(to + count * to_stride, (rows - count) * to_stride);
    return finite;
  }

  // Q of a unit. Returns whether all of it is finite.
  FLASHJIT_FN bool load_q(const CpuBackwardParams& params, const Problem& problem, Span rows) const {
    const bool finite = load(static_cast<const Element*>(params.q.data) + problem.q_offset(params.q) +
                                 rows.begin * params.q.row_stride,
                             params.q.row_stride, rows.size(), unit, head_dim, q, k_row);
    transpose_rows(q, k_row, head_dim, q_columns);
    return finite;
  }

  // p = the final scores of `count` keys from `begin` on, of which the mask may keep `kept`; -inf where it
  // drops them. raw = those before formulas, if these have derivatives. `first`: the block's first key.
  __attribute__((noinline)) void make_scores(const CpuBackwardParams& params, const Problem& problem,
                                             const Mask& mask, Span rows, Span kept, int begin, int count,
                                             int first) const {
    multiply<unit, Strides<k_row, 1, unit, unit>, false>(k + (begin - first) * k_row, q_columns, head_dim, p,
                                                         count);
    float* const seen = p + (kept.begin - begin) * unit;
    if constexpr (ScoreGradient::changes) copy(raw, p, count * unit);
    if constexpr (Score::changes) Score::modify_rows(params, problem, unit, seen, rows, kept, 1);
    if (!mask.whole(rows, kept)) {
      if constexpr (has_formula<Mask>)
        mask_rows(unit, mask, seen, rows, kept, problem.head_q, 1);
      else
        apply_mask(unit, mask, seen, rows, kept, 1);
    }
    leave_out(unit, p, 0, kept.begin - begin);
    leave_out(unit, p, kept.end - begin, count);
  }

  // Adds the share of `rows` and of the keys `kept`, of the block that begins with key `first`.
  __attribute__((noinline)) void add_unit(const CpuBackwardParams& params, const Problem& problem,
                                          const Mask& mask, Span rows, Span kept, int first, bool finite_k,
                                          float* sums) const {
    const bool finite_q = load_q(params, problem, rows);
    const bool finite_d_o = load(static_cast<const Element*>(params.d_o.data) + problem.q_offset(params.d_o) +
                                     rows.begin * params.d_o.row_stride,
                                 params.d_o.row_stride, rows.size(), unit, head_dim_v, d_o, v_row);
    const i64 at = workspace_row<Spec>(params, problem) + rows.begin;
    for (int i = 0; i < unit * dq_row; i += 16) fetch(sums + at * dq_row + i);  // dQ, for the last product
    transpose_rows(d_o, v_row, head_dim_v, d_o_columns);
    for (int i = 0; i < unit; ++i) {
      offset[i] = i < rows.size() ? params.offsets[at + i] : -minus_infinity;
      maximum[i] = i < rows.size() ? params.maxima[at + i] : static_cast<float>(Score::changes);
      delta[i] = i < rows.size() ? params.deltas[at + i] : 0;
    }
    const bool moves = any_moves(maximum, unit);
    if constexpr (Spec::dropout) make_row_words<Spec>(params, problem, rows, multiplier, addend);

    for (int begin = kept.begin / step_n * step_n; begin < kept.end; begin += step_n) {
      const Span some = intersect(kept, {begin, begin + step_n});
      if (Mask::row_intervals || touches(mask, rows, some))
        add_step(params, problem, mask, rows, some, first, finite_q, finite_k, finite_d_o, moves,
                 sums + at * dq_row);
    }
  }

  // The same for some of the keys.
  FLASHJIT_FN void add_step(const CpuBackwardParams& params, const Problem& problem, const Mask& mask,
                            Span rows, Span kept, int first, bool finite_q, bool finite_k, bool finite_d_o,
                            bool moves, float* dq) const {
    // Whole groups of eight keys.
    const int begin = kept.begin - kept.begin % 8, count = round_up(kept.end - begin, 8);
    const float* const keys = k + (begin - first) * k_row;
    make_scores(params, problem, mask, rows, kept, begin, count, first);
    multiply<unit, Strides<v_row, 1, unit, unit>, false>(v + (begin - first) * v_row, d_o_columns, head_dim_v,
                                                         ds, count);
    if (moves) move_scores(maximum, offset, unit, p, count);
    make_weights(params, begin - first, count);
    if constexpr (ScoreGradient::changes)
      ScoreGradient::apply(params, problem, unit, raw + (kept.begin - begin) * unit,
                           ds + (kept.begin - begin) * unit, rows, kept);
    const int depth = round_up(rows.size(), unrolled);  // rows beyond `rows` are zeros
    add_product<head_dim_v, Strides<unit, 1, v_row, v_row>>(finite_d_o, p, d_o, depth,
                                                            dv + (begin - first) * v_row, count);
    add_product<head_dim, Strides<unit, 1, k_row, k_row>>(finite_q, ds, q, depth,
                                                          dk + (begin - first) * k_row, count);
    add_product<head_dim, Strides<1, unit, k_row, dq_row>>(finite_k, ds, keys, count, dq,
                                                           round_up(rows.size(), 8));
  }

  // Replaces scores by weights, which dropout changes, and dO V^T by dS. The first key is the block's key
  // `first`.
  __attribute__((noinline)) void make_weights(const CpuBackwardParams& params, int first, int count) const {
    const Vec scale = splat(Score::scale_log2(params));
    Vec offsets[unit / lanes], subtracted[unit / lanes];
    for (int j = 0; j < unit / lanes; ++j) {
      offsets[j] = device::load(offset + j * lanes);
      subtracted[j] = device::load(delta + j * lanes);
    }
#pragma nounroll
    for (int key = 0; key < count; ++key) {
#pragma unroll
      for (int j = 0; j < unit / lanes; ++j) {
        const int i = j * lanes;
        float* const weight = p + key * unit + i;
        float* const gradient = ds + key * unit + i;
        const Vec e = exp2(weight_exponent(device::load(weight), scale, offsets[j]));
        Vec kept = e, dp = device::load(gradient);
        if constexpr (Spec::dropout) {
          const IntVec keeps =
              device::load(multiplier + i) * column[first + key] + device::load(addend + i) >=
              params.dropout.below;
          kept = select(keeps, e * params.dropout.scale, Vec{});
          dp = select(keeps, dp * params.dropout.scale, Vec{});
        }
        store(weight, kept);
        store(gradient, select(e == 0.0f, Vec{}, e * (dp - subtracted[j])));
      }
    }
  }

  // Writes dK and dV of the block's keys, padding included: its sums are 0.
  __attribute__((noinline)) void write_keys(const CpuBackwardParams& params, const Problem& slot,
                                            int first) const {
    Gradient* const to_k = static_cast<Gradient*>(params.dk.data) + slot.k_offset(params.dk);
    Gradient* const to_v = static_cast<Gradient*>(params.dv.data) + slot.k_offset(params.dv);
    for (int key = first; key < min(first + block_n, slot.seqlen_k); ++key) {
      write_row<Spec::batch_invariant>(dk + (key - first) * k_row, params.scale, head_dim,
                                       to_k + key * params.dk.row_stride);
      write_row<Spec::batch_invariant>(dv + (key - first) * v_row, 1.0f, head_dim_v,
                                       to_v + key * params.dv.row_stride);
    }
  }
};

}  // namespace flashjit::device
