// Backward attention on a CPU: weights are made again from lse (FlashAttention, Dao et al. 2022, algorithm
// 4), in three steps. The first makes delta of each row. In the second, an item takes blocks of keys of one
// key/value head. It keeps a block's K, V, dK and dV in scratch and passes all units of query rows by, of all
// query heads that share the key/value head. So dK and dV are sums of one item. dQ is a sum over blocks: each
// part of the blocks has one of its own in the workspace. The third step adds up the parts, always in the
// same order, and converts them.
//
// As in the forward, scores are held transposed, keys x rows. A struct computes blocks: VectorBackward
// (backward_vectors.h) or Bf16Backward (backward_bf16.h). It has
//   B(scratch)                               its destructor ends what it began
//   find_sums(params, problem, rows)         finds maxima and sums of far rows, see set_sums()
//   run(params, slot, first, sums)           computes dK and dV of the keys from `first` on, of at most
//                                            block_n, of the slot's key/value head, and adds their share to
//                                            dQ. slot: the problem of the group's first query head, with the
//                                            keys and rows of its batch entry's slot, padding included
//   write_dq<Gradient>(sums, scale, count, dq, stride)   converts the first `count` rows of a group of dQ
#pragma once

#include "cpu/tile.h"
#include "shared/backward_cpu_params.h"
#include "shared/score.h"

namespace flashjit::device {

// Defaults of a rendered Spec.
struct BackwardCpuSpec {
  using Mask = Intersect<Bounds>;
  using o_dtype = void;
  using grad_dtype = void;
  using Score = PlainScore;
  using Sinks = NoSinks;
  using Offsets = NoOffsets;
  static constexpr bool varlen = false, dropout = false, batch_invariant = false;
};

template <class Spec>
using GradientOf = typename OutputElement<typename Spec::grad_dtype, typename Spec::Element>::type;

template <class Spec>
FLASHJIT_FN Problem backward_problem(const CpuBackwardParams& params, int batch, int head) {
  return make_problem<Spec::varlen, Spec::Mask::padding>(params, batch, head);
}

// The first row of a problem in the workspace.
template <class Spec>
FLASHJIT_FN i64 workspace_row(const CpuBackwardParams& params, const Problem& problem) {
  const i64 first = Spec::varlen
                        ? cpu_backward_packed_rows(problem.first_q, problem.batch)
                        : static_cast<i64>(problem.batch) * round_up(params.seqlen_q, cpu_backward_group);
  return static_cast<i64>(problem.head_q) * params.rows + first;
}

// The problem of a query head of the slot's group. Where the slot begins and ends is not read again: the
// caller's memory may have changed, and everything of an item must lie within one slot.
template <class Spec>
FLASHJIT_FN Problem problem_in(const CpuBackwardParams& params, const Problem& slot, int head) {
  Problem problem = slot;
  problem.head_q = head;
  if constexpr (Spec::Mask::padding) {
    problem.seqlen_q = padded_length(params.seqlens_q, slot.batch, slot.seqlen_q);
    problem.seqlen_k = padded_length(params.seqlens_k, slot.batch, slot.seqlen_k);
  }
  return problem;
}

// The words of rows and of keys. Those of keys are made for whole groups of four.
template <class Spec>
__attribute__((noinline)) void make_row_words(const CpuBackwardParams& params, const Problem& problem,
                                              Span rows, u32* multiplier, u32* addend) {
  const Words key = dropout_key(params.dropout);
  for (int i = 0; i < rows.size(); ++i) {
    const RowWords words =
        row_words_at<typename Spec::Offsets>(params, key, rows.begin + i, problem.head_q, problem.batch);
    multiplier[i] = words.multiplier;
    addend[i] = words.addend;
  }
}
template <class Spec>
__attribute__((noinline)) void make_column_words(const CpuBackwardParams& params, int batch, Span keys,
                                                 u32* column) {
  const Words key = dropout_key(params.dropout);
  for (int group = keys.begin / 4; group * 4 < keys.end; ++group) {
    const Words words = column_words_at<typename Spec::Offsets>(params, key, group, batch);
    for (int i = 0; i < 4; ++i) column[group * 4 - keys.begin + i] = words.x[i];
  }
}

// lse beyond it, of either sign, is too far from 0: lse and scores are rounded to 2^-24 of their size, and so
// is their scale, so that weights would be off by more than 2^-22 * 2 |lse|. Up to here that is 2^-11.
constexpr float far_lse = 1024;
constexpr float log2_e = 1.44269504f;

// The scale of final scores in natural units.
template <class Score>
FLASHJIT_FN float natural_scale(const CpuBackwardParams& params) {
  return Score::changes ? 1.0f : params.scale;
}

FLASHJIT_FN bool any_moves(const float* maxima, int rows) {
  bool any = false;
  for (int i = 0; i < rows; ++i) any |= maxima[i] != 0;
  return any;
}
// Subtracts the rows' maxima, and leaves rows without weights out. NaN is subtracted from scores that the
// mask keeps only, so that weights of pairs that it drops are 0. s: [key][unit_rows].
__attribute__((noinline)) inline void move_scores(const float* maxima, const float* offsets, int unit_rows,
                                                  float* s, int keys) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const Vec maximum = load(maxima + i);
    const IntVec none = load(offsets + i) == -minus_infinity;
    for (float* q = s + i; q < s + keys * unit_rows; q += unit_rows)
      store(q, select(none | (load(q) == minus_infinity), splat(minus_infinity), load(q) - maximum));
  }
}

// The exponent of a weight, which is at most 1 whatever lse's rounding is.
FLASHJIT_FN Vec weight_exponent(Vec score, Vec scale, Vec offset) {
  const Vec x = fma(score, scale, -offset);
  return x > 0.0f ? Vec{} : x;
}

// Adds keys to the maxima and sums of exp2((score - maximum) * scale) of a unit's rows. s: [key][unit_rows].
__attribute__((noinline)) inline void add_scores(int unit_rows, float scale, const float* s, int keys,
                                                 RowState state) {
  for (int i = 0; i < unit_rows; i += lanes) {
    const float *const end = s + keys * unit_rows, *from = s + i;
    const Vec before = load(state.maximum + i);
    Vec maximum = before;
    for (const float* q = from; q < end; q += unit_rows) maximum = larger(load(q), maximum);
    const Vec reference = select(maximum == minus_infinity, Vec{}, maximum);
    Vec sum = load(state.sum + i) * exp2((before - reference) * scale);
    for (const float* q = from; q < end; q += unit_rows) sum += exp2((load(q) - reference) * scale);
    store(state.maximum + i, maximum);
    store(state.sum + i, sum);
  }
}

// log2 of a sink's weight in a row, before the row's offset is subtracted.
template <class Spec>
FLASHJIT_FN float sink_exponent(const CpuBackwardParams& params, int head, float maximum) {
  const Vec logit = splat(Spec::Sinks::logit(params, head)),
            scale = splat(natural_scale<typename Spec::Score>(params));
  return fma(splat(maximum), -scale, logit)[0] * log2_e;
}

// The maximum of far rows, which is infinity until set_sums() replaces it. Their offset is lse until then.
template <class Spec>
__attribute__((noinline)) void set_sums(const CpuBackwardParams& params, const Problem& problem, i64 row,
                                        int rows, RowState state) {
  using Score = typename Spec::Score;
  for (int i = 0; i < rows; ++i) {
    float &maximum = params.maxima[row + i], &offset = params.offsets[row + i];
    if (maximum != -minus_infinity) continue;
    const float lse = offset, sum = state.sum[i];
    maximum = state.maximum[i] == minus_infinity ? 0 : state.maximum[i];
    const float log2_sum = sum == 0 ? minus_infinity : log(splat(sum))[0] * log2_e;
    offset = log2_sum;
    if constexpr (Spec::Sinks::exist) {
      const float sink = sink_exponent<Spec>(params, problem.head_q, maximum), top = max(sink, log2_sum);
      if (top != minus_infinity) {
        const float both = exp2(splat(sink - top))[0] + exp2(splat(log2_sum - top))[0];
        offset = top + log(splat(both))[0] * log2_e;
      }
    }
    // An lse that is larger by more than roundings is a merge's, of more keys than these.
    const float given = fma(splat(maximum), -splat(natural_scale<Score>(params)), splat(lse))[0] * log2_e;
    const float rounding = __builtin_fabsf(lse) * 0x1p-20f * log2_e;
    if (given - offset > rounding && lse != -minus_infinity) offset = given;
    if (offset != offset) maximum = offset, offset = 0;
    if (offset == minus_infinity) offset = -minus_infinity;  // no keys
  }
}

// Writes a row of sums as elements, multiplied by `scale`. positive_zeros: 0 also where a block that the row
// has no part in may have made 0 of -0.
template <bool positive_zeros, class Element>
FLASHJIT_FN void write_row(const float* sums, float scale, int columns, Element* to) {
  for (int column = 0; column < columns; column += 8)
    store8(to + column, positive_zeros ? load_unaligned<Vec8>(sums + column) * scale + 0.0f
                                       : load_unaligned<Vec8>(sums + column) * scale);
}

// Calls body(problem, rows) for items [begin, end) of batch * heads * groups of rows. Rows begin at whole
// groups of the workspace; the last ones may be past the problem's.
template <class Spec, class Body>
FLASHJIT_FN void for_each_rows(const CpuBackwardParams& params, i64 begin, i64 end, Body body) {
  constexpr int rows = cpu_backward_rows_of_item;
  const int groups = max(ceil_div(params.seqlen_q, rows), 1);
  for (i64 item = begin; item < end; ++item) {
    const i64 head = item / groups;
    const Problem problem = backward_problem<Spec>(params, static_cast<int>(head / params.num_heads_q),
                                                   static_cast<int>(head % params.num_heads_q));
    const Span span = block_span(static_cast<int>(item % groups), rows);
    body(problem, intersect(span, {0, round_up(problem.rows, cpu_backward_group)}));
  }
}

FLASHJIT_FN i64 items_of_rows(const CpuBackwardParams& params) {
  const i64 groups = max(ceil_div(params.seqlen_q, cpu_backward_rows_of_item), 1);
  return static_cast<i64>(params.batch) * params.num_heads_q * groups;
}

// The first step: offset, maximum and delta of each row; then zeros of exact sums.
template <class Spec, class Config, class Params>
FLASHJIT_FN void backward_rows(const Params& params, i64 begin, i64 end, void* scratch) {
  const DenormalsAreZeros mode;
  if constexpr (has_gradients<Params>) {
    const i64 rows = items_of_rows(params);
    if (end > rows) clear_sums(params, max(begin, rows) - rows, end - rows);
    end = min(end, rows);
  }
  using Element = typename Spec::Element;
  using OElement = typename OutputElement<typename Spec::o_dtype, Element>::type;
  for_each_rows<Spec>(params, begin, end, [&](const Problem& problem, Span rows) {
    const OElement* const o = static_cast<const OElement*>(params.o.data) + problem.q_offset(params.o);
    const Element* const d_o = static_cast<const Element*>(params.d_o.data) + problem.q_offset(params.d_o);
    const float* const lse = static_cast<const float*>(params.lse.data) + problem.q_offset(params.lse);
    const i64 first = workspace_row<Spec>(params, problem);
    bool any_far = false;
    for (int row = rows.begin; row < rows.end; ++row) {
      // Formulas of padding may have any value.
      float offset = -minus_infinity, delta = 0, maximum = Spec::Score::changes;
      if (row < problem.seqlen_q) {
        const float of_row = lse[row * params.lse.row_stride];
        const bool finite = of_row - of_row == 0;
        maximum = of_row == minus_infinity ? 0.0f : static_cast<float>(!finite);
        Int8 any{};
        Vec8 sums{};
        for (int column = 0; column < Spec::head_dim_v; column += 8) {
          const Vec8 gradient = load8(d_o + row * params.d_o.row_stride + column);
          sums += load8(o + row * params.o.row_stride + column) * gradient;
          any |= reinterpret_cast<Int8>(gradient) << 1;
        }
        float dlse = 0;
        if (params.dlse.data)
          dlse = (static_cast<const float*>(params.dlse.data) +
                  problem.q_offset(params.dlse))[row * params.dlse.row_stride];
        // A row whose do and dlse are 0 gives nothing, whatever its scores are.
        if (of_row != minus_infinity && (dlse != 0 || __builtin_reduce_or(any) != 0)) {
          for (int i = 0; i < 8; ++i) delta += sums[i];
          delta -= dlse;
          if (of_row != of_row) {
            maximum = of_row, offset = 0;
          } else if (__builtin_fabsf(of_row) > far_lse) {
            any_far = true, maximum = -minus_infinity, offset = of_row;
          } else {
            maximum = 0, offset = of_row / ln_2;
          }
        }
      }
      params.offsets[first + row] = offset;
      params.maxima[first + row] = maximum;
      params.deltas[first + row] = delta;
    }
    if (any_far) {
      typename Config::Products block(scratch);
      block.find_sums(params, problem, {rows.begin, min(rows.end, problem.seqlen_q)});
    }
  });
}

// The second step. Items are batch * heads_kv * parts.
template <class Spec, class Config>
FLASHJIT_FN void backward(const CpuBackwardParams& params, i64 begin, i64 end, void* scratch) {
  const DenormalsAreZeros mode;
  typename Config::Products block(scratch);
  constexpr int row = cpu_backward_row(Spec::head_dim), block_n = Config::block_n;
  const int group = params.num_heads_q / params.num_heads_kv;
  for (i64 item = begin; item < end; ++item) {
    const int part = static_cast<int>(item % params.parts);
    const int head_kv = static_cast<int>(item / params.parts % params.num_heads_kv);
    const int batch = static_cast<int>(item / params.parts / params.num_heads_kv);
    float* const sums = params.sums + static_cast<i64>(part) * params.num_heads_q * params.rows * row;
    const Problem slot = make_problem<Spec::varlen>(params, batch, head_kv * group);
    for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
      float* const first = sums + workspace_row<Spec>(params, problem_in<Spec>(params, slot, head)) * row;
      const i64 floats = static_cast<i64>(round_up(slot.rows, cpu_backward_group)) * row;
      for (i64 i = 0; i < floats; i += lanes) store(first + i, Vec{});
    }
    for (int key = part * block_n; key < slot.seqlen_k; key += params.parts * block_n)
      block.run(params, slot, key, sums);
  }
}

// The third step: adds up the parts of dQ, which are 0 for padding; and what rows give sink logits.
template <class Spec, class Config, class Params>
FLASHJIT_FN void backward_dq(const Params& params, i64 begin, i64 end) {
  const DenormalsAreZeros mode;
  constexpr int row_floats = cpu_backward_row(Spec::head_dim), group = cpu_backward_group;
  const i64 part_floats = static_cast<i64>(params.num_heads_q) * params.rows * row_floats;
  for_each_rows<Spec>(params, begin, end, [&](const Problem& problem, Span rows) {
    GradientOf<Spec>* const dq = static_cast<GradientOf<Spec>*>(params.dq.data) + problem.q_offset(params.dq);
    float* const sums = params.sums + workspace_row<Spec>(params, problem) * row_floats;
    if constexpr (Spec::Sinks::exist) {
      const i64 first = workspace_row<Spec>(params, problem);
      add_to_sink_logit<Spec>(params, problem, first + rows.begin, rows.size());
    }
    for (int row = rows.begin; row < rows.end; row += group) {
      float* const sum = sums + static_cast<i64>(row) * row_floats;
      for (int part = 1; part < params.parts; ++part)
        for (int c = 0; c < group * row_floats; c += lanes)
          store(sum + c, load(sum + c) + load(sum + part * part_floats + c));
      Config::Products::template write_dq<GradientOf<Spec>>(sum, params.scale, min(group, problem.rows - row),
                                                            dq + row * params.dq.row_stride,
                                                            params.dq.row_stride);
    }
  });
}

}  // namespace flashjit::device
