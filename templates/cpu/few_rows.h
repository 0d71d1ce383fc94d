// The forward of a head of few rows. Each of its keys serves few rows, so packing would cost more than it
// saves: K and V are multiplied as they lie in memory (row_products.h). Scores and weights are S^T and P^T as
// in forward_tile.h, with query rows as lanes, so that scales, formulas, masks, dropout and softmax are the
// same. Sums of O lie row by row until the end.
#pragma once

#include "cpu/forward_tile.h"
#include "cpu/row_products.h"

namespace flashjit::device {

template <class Spec, class Config>
struct FewRowsTile : ForwardTile<Spec, Config> {
  using Base = ForwardTile<Spec, Config>;
  using Base::block_n, Base::head_dim, Base::head_dim_v, Base::o_row, Base::quantised;
  using typename Base::Element, typename Base::KeyRows, typename Base::Mask, typename Base::Operand,
      typename Base::Products, typename Base::Score;
  using KvElement = typename OutputElement<typename Spec::kv_dtype, Element>::type;
  using Weighing = typename Choose<__is_base_of(Float32Weights, Products), Products, Float32Weights>::type;

  static constexpr int load_width = load_columns_of<KvElement>;
  static constexpr int q_columns = round_up(head_dim, load_width),
                       o_columns = round_up(head_dim_v, load_width);
  // Rows of Q as floats and sums of O lie where a packed block would.
  static constexpr int lent_floats =
      (Products::k_block + Products::v_block) * sizeof(Operand) / sizeof(float);
  static constexpr int most_rows =
      min(most_few_rows, lent_floats / (q_columns + o_columns) / row_group * row_group);
  static_assert(most_few_rows <= 16);  // rows of the shortest units
  // Heads that take turns at the keys: their rows of a key lie side by side in memory, and in the same page.
  static constexpr int rows_of_head = round_up(most_rows, Products::row_step);
  static constexpr int most_heads =
      Mask::row_intervals
          ? max(min(lent_floats / (most_rows * (q_columns + o_columns)), Base::most_rows / rows_of_head), 1)
          : 1;
  static constexpr int values_at_once = 16;
  // Keys of a step.
  static constexpr int step_keys = min(64, Products::score_blocks* Base::s_block / 16 / 16 * 16);

  float *q, *sums;  // of a head: [most_rows][q_columns], [most_rows][o_columns]

  FLASHJIT_FN explicit FewRowsTile(void* scratch)
      : Base(scratch),
        q(reinterpret_cast<float*>(this->k_of(this->packed_block(0)))),
        sums(q + most_heads * most_rows * q_columns) {}

  // Whether a problem takes this way.
  FLASHJIT_FN static bool suits(const CpuForwardParams& params, const Problem& problem) {
    if constexpr (Spec::batch_invariant) return false;  // other rows would decide the order of sums
    const i64 bytes = i64{problem.seqlen_k} * (head_dim + head_dim_v) * sizeof(KvElement);
    return problem.seqlen_q * params.packed_heads <= min(most_rows, cpu_few_rows(lanes, bytes));
  }

  // Of `heads` heads, how many run() computes in turns, if the tile has all their rows and keys.
  FLASHJIT_FN static int heads_at_once(Span tile, int heads) {
    return tile.size() <= most_rows ? min(heads, most_heads) : 1;
  }
  // Moves on to the next of these heads.
  FLASHJIT_FN void to_next_head(const CpuForwardParams& params, Problem& problem) {
    this->o += rows_of_head * o_row;
    this->state += rows_of_head * cpu_row_state;
    q += most_rows * q_columns;
    sums += most_rows * o_columns;
    if constexpr (Spec::dropout) this->multiplier += rows_of_head, this->addend += rows_of_head;
    problem.head_q += params.packed_heads;
    problem.head_kv = problem.head_q / (params.num_heads_q / params.num_heads_kv);
  }

  // As Base::run(), for `heads` heads (with packed_heads, groups of them) from `problem` on; O is ready after
  // end(). The valid rows are in the first tile's first unit.
  __attribute__((noinline)) void run(const CpuForwardParams& params, const Problem& problem, Span tile,
                                     int part, int heads) const {
    const typename Base::Work work(params, problem, tile, part);
    const auto each_head = [&](auto body) __attribute__((always_inline)) {
      FewRowsTile one = *this;
      Problem of = problem;
      for (int i = 0; i < heads; ++i, one.to_next_head(params, of)) body(one, of);
    };
    each_head([&](const FewRowsTile& one, const Problem& of)
                  __attribute__((always_inline)) { one.begin(params, of, tile, work.valid); });
    if (work.valid.empty()) return;
    clear(this->s, step_keys * round_up(work.valid.size(), lanes));  // lanes beyond the rows
    this->packed_block(0).index = -1;
    const auto run_block = [&](int index) __attribute__((always_inline)) {
      const Span keys = intersect(work.within, block_span(index, block_n));
      if (keys.empty()) return;
      if constexpr (Spec::dropout) this->make_column_words(params, problem, keys);
      for (int from = keys.begin; from < keys.end; from += step_keys) {
        const Span kept = {from, min(from + step_keys, keys.end)};
        if (!Mask::row_intervals && !touches(work.mask, work.positions, kept)) continue;
        each_head([&](const FewRowsTile& one, const Problem& of)
                      __attribute__((always_inline)) { one.take_step(params, of, work, kept); });
      }
    };
    if constexpr (Mask::row_intervals) {
      for (int index = max(work.within.begin, 0) / block_n; index * block_n < work.within.end; ++index)
        run_block(index);
    } else {
      BlockWalk<Keys, Mask> walk(work.mask, work.positions, block_n, work.ours);
      for (Block block; walk.next(block);) run_block(block.index);
    }
  }
  // Makes O^T of the sums.
  __attribute__((noinline)) void end(const CpuForwardParams& params, const Problem& problem,
                                     Span tile) const {
    const int rows = Base::valid_rows(params, problem, tile).size();
    const int unit_rows = Base::rows_of_unit(params, tile, tile.begin);
    for (int i = 0; i < rows; ++i) {
      float* const from = sums + i * o_columns;
#pragma nounroll
      for (int c = 0; c < o_columns; c += load_width) order_columns<KvElement>(from + c);
#pragma nounroll
      for (int c = 0; c < head_dim_v; ++c) this->o[c * unit_rows + i] = from[c];
    }
  }

 private:
  __attribute__((noinline)) void begin(const CpuForwardParams& params, const Problem& problem, Span tile,
                                       Span rows) const {
    this->clear_states(params, tile);
    if (rows.empty()) return;
    load_q(params, problem, rows, q);
    clear(sums, most_rows * o_columns);
    if constexpr (Spec::dropout) this->make_row_words(params, problem, tile);
  }
  // The keys `kept`.
  __attribute__((noinline)) void take_step(const CpuForwardParams& params, const Problem& problem,
                                           const typename Base::Work& work, Span kept) const {
    const Span rows = work.valid;
    const int lanes_of_rows = round_up(rows.size(), lanes);
    const KeyRows of(params, problem);
    const auto stored = of.template stored<step_keys>(kept, work.within.end);
    take_scores(rows.size(), kept.size(), stored.of_k, q, lanes_of_rows);
    const bool whole =
        Base::edit_scores(params, problem, work.mask, lanes_of_rows, this->s, rows, work.positions, kept);
    const auto dropout = [&] {
      if constexpr (Spec::dropout)
        return Drop{this->multiplier, this->addend, this->column + kept.begin % block_n,
                    params.dropout.below};
      else
        return KeepAll{};
    }();
    Weighing weighing;
    softmax(lanes_of_rows, this->s, Score::scale_log2(params),
            Base::row_state(this->state, 0, work.unit_rows), this->alpha, kept.size(), dropout, weighing);
    if constexpr (quantised) of.scale_weights(lanes_of_rows, this->s, kept);
    add_products(rows.size(), kept.size(), stored.of_v, lanes_of_rows, whole);
  }
  // Rows of Q in the order of columns of K's loads. The last row stands in for those that fill up a group.
  FLASHJIT_FN static void load_q(const CpuForwardParams& params, const Problem& problem, Span rows,
                                 float* q) {
    const Element* const data = static_cast<const Element*>(params.q.data) + problem.q_offset(params.q);
    for (int i = 0; i < round_up(rows.size(), row_group); ++i, q += q_columns) {
      const Element* const from = data + Base::offset(params, params.q, min(rows.begin + i, rows.end - 1));
      if constexpr (quantised) {
#pragma nounroll
        for (int c = 0; c < q_columns; c += 8) store8(q + c, c < head_dim ? load8(from + c) : Vec8{});
      } else {
#pragma nounroll
        for (int c = 0; c < q_columns; c += load_width) {
          Vec columns[vectors_of_load<KvElement>];
          load_columns<head_dim>(from, c, columns);
          for (int j = 0; j < vectors_of_load<KvElement>; ++j) store(q + c + j * lanes, columns[j]);
        }
      }
    }
  }

  // S^T = K Q^T: s[key][lanes_of_rows].
  template <class KeyRow>
  __attribute__((noinline)) void take_scores(int rows, int keys, const KeyRow& k, const float* q,
                                             int lanes_of_rows) const {
    int row = 0;
    for (; rows - row > 1; row += row_group)
      for (int first = 0; first < keys; first += keys_at_once<row_group>) {
        const KvElement *of[keys_at_once<row_group>], *next[keys_at_once<row_group>];
#pragma unroll
        for (int j = 0; j < keys_at_once<row_group>; ++j) {
          of[j] = k[min(first + j, keys - 1)];
          next[j] = k[first + j + rows_ahead];
        }
        const Vec scores = dot_products<row_group, head_dim>(
            q + row * q_columns, q_columns, of, next,
            [](int r, int j) __attribute__((always_inline)) { return j * row_group + r; });
#pragma unroll
        for (int j = 0; j < keys_at_once<row_group>; ++j)
          __builtin_memcpy(this->s + (first + j) * lanes_of_rows + row,
                           reinterpret_cast<const char*>(&scores) + j * row_group * sizeof(float),
                           row_group * sizeof(float));
      }
    if (row < rows)
      for (int key = 0; key < keys; ++key)
        this->s[key * lanes_of_rows + row] =
            dot_product<head_dim>(q + row * q_columns, k[key], k[key + rows_ahead]);
  }

  // O = O * alpha + P V. `whole`: the rows see all keys; otherwise V may hold anything where a weight is 0.
  template <class ValueRow>
  __attribute__((noinline)) void add_products(int rows, int keys, const ValueRow& v, int lanes_of_rows,
                                              bool whole) const {
    const bool all = whole || finite(keys, v);
    for (int i = 0; i < rows; ++i) {
      const float by = this->alpha[i];
      if (by == 1) continue;
      for (float* o = sums + i * o_columns; o < sums + (i + 1) * o_columns; o += lanes)
        store(o, load(o) * by);
    }
    // Groups of rows take turns, so that they find a key's row in the first-level cache.
    const int at_once = !all ? 1 : rows > row_group ? values_at_once : step_keys;
    for (int first = 0; first < keys; first += at_once) {
      const int some = min(at_once, keys - first);
      const auto row_of = [&](int key) __attribute__((always_inline)) { return v[first + key]; };
      const auto next = [&](int key) __attribute__((always_inline)) { return v[first + key + rows_ahead]; };
      for (int row = 0, together; row < rows; row += together) {
        together = all && rows - row > 1 ? row_group : 1;
        const Weights weights{this->s + first * lanes_of_rows + row, 1, lanes_of_rows};
        float* const o = sums + row * o_columns;
        if (together > 1)
          add_values<row_group, head_dim_v, true>(weights, some, row_of, next, o, o_columns);
        else if (all || *weights.data != 0)
          add_values<1, head_dim_v, true>(weights, some, row_of, next, o, o_columns);
      }
    }
  }

  template <class ValueRow>
  __attribute__((noinline)) static bool finite(int keys, const ValueRow& v) {
    Int8 largest{};  // exponent and fraction bits, which order as magnitudes do
    for (int key = 0; key < keys; ++key) {
      const KvElement* const row = v[key];
#pragma nounroll
      for (int column = 0; column < head_dim_v; column += 8) {
        const Int8 magnitude = reinterpret_cast<Int8>(load8(row + column)) << 1;
        largest = largest > magnitude ? largest : magnitude;
      }
    }
    return __builtin_reduce_max(largest) < 0xff000000u;
  }
};

}  // namespace flashjit::device
