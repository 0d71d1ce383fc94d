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
    const i64 bytes = i64{problem.seqlen_k} * (head_dim + head_dim_v) * sizeof(KvElement);
    return problem.seqlen_q * params.packed_heads <= min(most_rows, cpu_few_rows(lanes, bytes));
  }

  // Of `heads` heads, how many run() computes in turns, if the tile has all their rows and keys.
  FLASHJIT_FN static int heads_at_once(Span tile, int heads) {
    return tile.size() <= most_rows ? min(heads, most_heads) : 1;
  }
  // The result of the i-th of these heads.
  FLASHJIT_FN FewRowsTile of_head(int i) const {
    FewRowsTile other = *this;
    other.o += i * rows_of_head * o_row;
    other.state += i * rows_of_head * cpu_row_state;
    other.q += i * most_rows * q_columns;
    other.sums += i * most_rows * o_columns;
    if constexpr (Spec::dropout) other.multiplier += i * rows_of_head, other.addend += i * rows_of_head;
    return other;
  }
  FLASHJIT_FN static Problem problem_of_head(const CpuForwardParams& params, const Problem& first, int i) {
    Problem other = first;
    other.head_q += i * params.packed_heads;
    if (i > 0) other.head_kv = other.head_q / (params.num_heads_q / params.num_heads_kv);
    return other;
  }

  // As Base::run(), for `heads` heads (with packed_heads, groups of them) from `problem` on. The valid rows
  // are in the first tile's first unit.
  __attribute__((noinline)) void run(const CpuForwardParams& params, const Problem& problem, Span tile,
                                     int part, int heads) const {
    const Span rows = Base::valid_rows(params, problem, tile), positions = Base::positions(params, rows);
    const int unit_rows = Base::rows_of_unit(params, tile, tile.begin);
    for (int i = 0; i < heads; ++i) of_head(i).begin(params, problem_of_head(params, problem, i), tile, rows);
    if (rows.empty()) return;
    clear(this->s, step_keys * round_up(rows.size(), lanes));  // lanes beyond the rows
    this->packed_block(0).index = -1;
    Mask mask(params, problem);
    see_heads(mask, {problem.head_q, problem.head_q + params.packed_heads});
    const Span hull = searched_hull(mask, positions), ours = Base::part_of(hull, part, params.key_parts);
    const Span within = intersect(hull, ours);
    const auto run_block = [&](int index) __attribute__((always_inline)) {
      const Span keys = intersect(within, block_span(index, block_n));
      if (keys.empty()) return;
      if constexpr (Spec::dropout) this->make_column_words(params, problem, keys);
      for (int from = keys.begin; from < keys.end; from += step_keys) {
        const Span kept = {from, min(from + step_keys, keys.end)};
        if (!Mask::row_intervals && !touches(mask, positions, kept)) continue;
        for (int i = 0; i < heads; ++i)
          of_head(i).take_step(params, problem_of_head(params, problem, i), mask, rows, positions, unit_rows,
                               kept, within.end);
      }
    };
    if constexpr (Mask::row_intervals) {
      for (int index = max(within.begin, 0) / block_n; index * block_n < within.end; ++index)
        run_block(index);
    } else {
      BlockWalk<Keys, Mask> walk(mask, positions, block_n, ours);
      for (Block block; walk.next(block);) run_block(block.index);
    }
    for (int i = 0; i < heads; ++i) of_head(i).end(rows, unit_rows);
  }

 private:
  FLASHJIT_FN void begin(const CpuForwardParams& params, const Problem& problem, Span tile, Span rows) const {
    Base::for_each_unit(params, tile, [&](int row, int unit_rows) __attribute__((always_inline)) {
      Base::clear_state(Base::row_state(this->state, row, unit_rows), unit_rows);
    });
    if (rows.empty()) return;
    load_q(params, problem, rows, q);
    clear(sums, most_rows * o_columns);
    if constexpr (Spec::dropout) this->make_row_words(params, problem, tile);
  }
  // The keys `kept`; `end` is the last that the rows may see.
  __attribute__((noinline)) void take_step(const CpuForwardParams& params, const Problem& problem,
                                           const Mask& mask, Span rows, Span positions, int unit_rows,
                                           Span kept, int end) const {
    const int lanes_of_rows = round_up(rows.size(), lanes);
    const KeyRows of(params, problem);
    const auto stored = of.template stored<step_keys>(kept, end);
    take_scores(rows.size(), kept.size(), stored.of_k, q, lanes_of_rows);
    const bool whole =
        Base::edit_scores(params, problem, mask, lanes_of_rows, this->s, rows, positions, kept);
    const auto dropout = [&] {
      if constexpr (Spec::dropout)
        return Drop{this->multiplier, this->addend, this->column + kept.begin % block_n,
                    params.dropout.below};
      else
        return KeepAll{};
    }();
    Weighing weighing;
    softmax(lanes_of_rows, this->s, Score::scale_log2(params), Base::row_state(this->state, 0, unit_rows),
            this->alpha, kept.size(), dropout, weighing);
    if constexpr (quantised) of.scale_weights(lanes_of_rows, this->s, kept);
    add_products(rows.size(), kept.size(), stored.of_v, lanes_of_rows, whole);
  }
  // O^T of the sums.
  FLASHJIT_FN void end(Span rows, int unit_rows) const {
    for (int i = 0; i < rows.size(); ++i) {
      float* const from = sums + i * o_columns;
#pragma nounroll
      for (int c = 0; c < o_columns; c += load_width) order_columns<KvElement>(from + c);
#pragma nounroll
      for (int c = 0; c < head_dim_v; ++c) this->o[c * unit_rows + i] = from[c];
    }
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
    for (int i = 0; i < rows; ++i) {
      const float by = this->alpha[i];
      if (by == 1) continue;
      for (float* o = sums + i * o_columns; o < sums + (i + 1) * o_columns; o += lanes)
        store(o, load(o) * by);
    }
    if (!whole && !finite(keys, v)) {
      const auto row_of = [&](int key) __attribute__((always_inline)) { return v[key]; };
      for (int row = 0; row < rows; ++row)
        add_seen_values<head_dim_v>(Weights{this->s, 1, lanes_of_rows}, row, keys, row_of,
                                    sums + row * o_columns);
      return;
    }
    // Groups of rows take turns, so that they find a key's row in the first-level cache.
    const int at_once = rows > row_group ? values_at_once : step_keys;
    for (int first = 0; first < keys; first += at_once) {
      const int some = min(at_once, keys - first);
      const auto row_of = [&](int key) __attribute__((always_inline)) { return v[first + key]; };
      const auto next = [&](int key) __attribute__((always_inline)) { return v[first + key + rows_ahead]; };
      int row = 0;
      const auto weights = [&]() __attribute__((always_inline)) {
        return Weights{this->s + first * lanes_of_rows + row, 1, lanes_of_rows};
      };
      for (; rows - row > 1; row += row_group)
        add_values<row_group, head_dim_v, true>(weights(), some, row_of, next, sums + row * o_columns,
                                                o_columns);
      if (row < rows)
        add_values<1, head_dim_v, true>(weights(), some, row_of, next, sums + row * o_columns, o_columns);
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
