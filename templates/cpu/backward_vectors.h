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

// out[i] (+)= sum over k < depth of m(i, k) * x[k], for i < count, a multiple of 8. x: [depth][x_stride],
// out: [count][out_stride]. `add`: out is added to. With `selective`, terms whose m is zero are left out, so
// that NaN and infinity in x reach only results that give them a weight.
template <int vectors, bool selective>
FLASHJIT_FN void multiply_rows(Matrix m, const float* x, i64 x_stride, int depth, float* out, i64 out_stride,
                               int count, bool add) {
  constexpr int steps = vectors > 1 ? step : 8;
  for (; count > 0; count -= steps, m.data += steps * m.i_stride, out += steps * out_stride) {
    Rows<vectors> sums[steps] = {};
    if (add) {
#pragma unroll
      for (int i = 0; i < steps; ++i) sums[i] = load_rows<vectors>(out + i * out_stride);
    }
    const float* column = m.data;
    const float* row = x;
#pragma nounroll
    for (int k = 0; k < depth; ++k, column += m.k_stride, row += x_stride) {
      const auto r = load_rows<vectors>(row);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const Vec by = splat(column[i * m.i_stride]);
#pragma unroll
        for (int j = 0; j < vectors; ++j) {
          const Vec sum = fma(by, r.v[j], sums[i].v[j]);
          sums[i].v[j] = selective ? select(by == 0.0f, sums[i].v[j], sum) : sum;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) store(out + i * out_stride, sums[i]);
  }
}
// The same for `columns` columns of x and out, rounded up to whole vectors.
template <bool selective>
__attribute__((noinline)) void multiply_columns(Matrix m, const float* x, i64 x_stride, int depth, float* out,
                                                i64 out_stride, int count, int columns, bool add) {
  while (columns > 0) {
    const int vectors = unit_vectors(columns);
    if (vectors == 3)
      multiply_rows<3, selective>(m, x, x_stride, depth, out, out_stride, count, add);
    else if (vectors == 2)
      multiply_rows<2, selective>(m, x, x_stride, depth, out, out_stride, count, add);
    else
      multiply_rows<1, selective>(m, x, x_stride, depth, out, out_stride, count, add);
    columns -= vectors * lanes, x += vectors * lanes, out += vectors * lanes;
  }
}
FLASHJIT_FN void add_product(bool finite, Matrix m, const float* x, i64 x_stride, int depth, float* out,
                             i64 out_stride, int count, int columns) {
  if (finite)
    multiply_columns<false>(m, x, x_stride, depth, out, out_stride, count, columns, true);
  else
    multiply_columns<true>(m, x, x_stride, depth, out, out_stride, count, columns, true);
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
  static constexpr int unit = backward_unit;
  using Element = typename Spec::Element;
  using Gradient = GradientOf<Spec>;
  using Mask = typename Spec::Mask;

  // Scratch, in this order.
  float *k, *v, *dk, *dv;          // [block_n][k_row], [block_n][v_row], twice
  float *q, *d_o;                  // [unit][k_row], [unit][v_row]
  float *q_columns, *d_o_columns;  // [head_dim][unit], [head_dim_v][unit]
  float *p, *ds;                   // [block_n][unit]; scores, then weights; dO V^T, then dS
  float *offset, *delta;           // [unit]
  u32 *multiplier, *addend;        // [unit]; with dropout only
  u32* column;                     // [block_n]; with dropout only

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
    p = take(block_n * unit), ds = take(block_n * unit);
    offset = take(unit), delta = take(unit);
    multiplier = reinterpret_cast<u32*>(take(unit)), addend = reinterpret_cast<u32*>(take(unit));
    column = reinterpret_cast<u32*>(next);
  }

  // Computes dK and dV of the keys from `first` on, of at most block_n, and adds to dQ.
  FLASHJIT_FN void run(const CpuBackwardParams& params, int batch, int head_kv, int first,
                       float* sums) const {
    const int group = params.num_heads_q / params.num_heads_kv;
    const Problem any = backward_problem<Spec>(params, batch, head_kv * group);
    const Span keys = {first, min(first + block_n, any.seqlen_k)};
    clear(dk, block_n * (k_row + v_row));  // dv follows
    if (!keys.empty()) {
      const bool finite = load(
          static_cast<const Element*>(params.k.data) + any.k_offset(params.k) + first * params.k.row_stride,
          params.k.row_stride, keys.size(), block_n, head_dim, k, k_row);
      load(static_cast<const Element*>(params.v.data) + any.k_offset(params.v) + first * params.v.row_stride,
           params.v.row_stride, keys.size(), block_n, head_dim_v, v, v_row);
      if constexpr (Spec::dropout) make_column_words(params, batch, keys, column);
      for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        const Problem problem = backward_problem<Spec>(params, batch, head);
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
    write_keys(params, any, first);
  }

  // A group of dQ is [group][row].
  template <class To>
  FLASHJIT_FN static void write_dq(const float* sums, float scale, int count, To* dq, i64 stride) {
    for (int i = 0; i < count; ++i)
      write_row(sums + i * cpu_backward_row(head_dim), scale, head_dim, dq + i * stride);
  }

 private:
  // Converts `count` rows to floats; rows from there to `rows` become zeros. Returns whether all are finite.
  __attribute__((noinline)) static bool load(const Element* from, i64 stride, int count, int rows,
                                             int columns, float* to, int to_stride) {
    const bool finite = pack(StridedRows<Element>{from, stride}, count, columns, to, to_stride);
    clear(to + count * to_stride, (rows - count) * to_stride);
    return finite;
  }

  // Adds the share of `rows` and of the keys `kept`, of the block that begins with key `first`.
  __attribute__((noinline)) void add_unit(const CpuBackwardParams& params, const Problem& problem,
                                          const Mask& mask, Span rows, Span kept, int first, bool finite_k,
                                          float* sums) const {
    const bool finite_q = load(static_cast<const Element*>(params.q.data) + problem.q_offset(params.q) +
                                   rows.begin * params.q.row_stride,
                               params.q.row_stride, rows.size(), unit, head_dim, q, k_row);
    const bool finite_d_o = load(static_cast<const Element*>(params.d_o.data) + problem.q_offset(params.d_o) +
                                     rows.begin * params.d_o.row_stride,
                                 params.d_o.row_stride, rows.size(), unit, head_dim_v, d_o, v_row);
    transpose_rows(q, k_row, head_dim, q_columns);
    transpose_rows(d_o, v_row, head_dim_v, d_o_columns);
    const i64 at = workspace_row<Spec>(params, problem) + rows.begin;
    for (int i = 0; i < unit; ++i) {
      offset[i] = i < rows.size() ? params.offsets[at + i] : -minus_infinity;
      delta[i] = i < rows.size() ? params.deltas[at + i] : 0;
    }
    if constexpr (Spec::dropout) make_row_words(params, problem, rows, multiplier, addend);

    // Whole groups of eight keys.
    const Span seen = {kept.begin - first, kept.end - first};
    const Span used = {seen.begin / 8 * 8, round_up(seen.end, 8)};
    float* const s = p + used.begin * unit;
    float* const dp = ds + used.begin * unit;
    const float* const keys = k + used.begin * k_row;
    multiply_columns<false>({keys, k_row, 1}, q_columns, unit, head_dim, s, unit, used.size(), unit, false);
    multiply_columns<false>({v + used.begin * v_row, v_row, 1}, d_o_columns, unit, head_dim_v, dp, unit,
                            used.size(), unit, false);
    if (!mask.whole(rows, kept)) apply_mask(unit, mask, p + seen.begin * unit, rows, kept, 1);
    leave_out(unit, p, used.begin, seen.begin);
    leave_out(unit, p, seen.end, used.end);
    make_weights(params, used);
    add_product(finite_d_o, {s, unit, 1}, d_o, v_row, rows.size(), dv + used.begin * v_row, v_row,
                used.size(), head_dim_v);
    add_product(finite_q, {dp, unit, 1}, q, k_row, rows.size(), dk + used.begin * k_row, k_row, used.size(),
                head_dim);
    add_product(finite_k, {dp, 1, unit}, keys, k_row, used.size(), sums + at * cpu_backward_row(head_dim),
                cpu_backward_row(head_dim), round_up(rows.size(), 8), head_dim);
  }

  // Replaces scores by weights, which dropout changes, and dO V^T by dS.
  __attribute__((noinline)) void make_weights(const CpuBackwardParams& params, Span keys) const {
    const Vec scale = splat(params.scale_log2);
    for (int i = 0; i < unit; i += lanes) {
      const Vec offsets = device::load(offset + i), subtracted = device::load(delta + i);
#pragma nounroll
      for (int key = keys.begin; key < keys.end; ++key) {
        float* const weight = p + key * unit + i;
        float* const gradient = ds + key * unit + i;
        const Vec e = exp2(fma(device::load(weight), scale, -offsets));
        Vec kept = e, dp = device::load(gradient);
        if constexpr (Spec::dropout) {
          const IntVec keeps =
              device::load(multiplier + i) * column[key] + device::load(addend + i) >= params.dropout.below;
          kept = select(keeps, e * params.dropout.scale, Vec{});
          dp = select(keeps, dp * params.dropout.scale, Vec{});
        }
        store(weight, kept);
        store(gradient, select(e == 0.0f, Vec{}, e * (dp - subtracted)));
      }
    }
  }

  // Writes dK and dV of the block's keys, padding included: its sums are 0.
  __attribute__((noinline)) void write_keys(const CpuBackwardParams& params, const Problem& problem,
                                            int first) const {
    Gradient* const to_k = static_cast<Gradient*>(params.dk.data) + problem.k_offset(params.dk);
    Gradient* const to_v = static_cast<Gradient*>(params.dv.data) + problem.k_offset(params.dv);
    for (int key = first; key < min(first + block_n, slot_keys<Spec>(params, problem)); ++key) {
      write_row(dk + (key - first) * k_row, params.scale, head_dim, to_k + key * params.dk.row_stride);
      write_row(dv + (key - first) * v_row, 1.0f, head_dim_v, to_v + key * params.dv.row_stride);
    }
  }
};

}  // namespace flashjit::device
