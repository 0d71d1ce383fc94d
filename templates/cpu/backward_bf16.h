// Backward by products of bf16. A block's keys and a unit's rows are divided into groups of 32. For each pair
// of groups, S^T and dO V^T become weights P^T and dS^T, which are rounded to bf16 for three products:
//
//   S^T = K Q^T, dP^T = V dO^T    32 keys x 32 rows       terms: columns
//   dQ^T += K^T dS^T              32 columns x 32 rows    terms: keys, once a group of rows and block
//   dV += P^T dO, dK += dS^T Q    32 keys x 32 columns    terms: rows, once a group of keys and unit
//
// All of them are one routine, BlockProduct::multiply (backward_amx.h, backward_pairs.h). Its sums are
// blocks of 32 x 32 float32, which are loaded once and stored once. A tile of b holds two terms in a row, so
// Q and dO are packed in pairs of columns and in pairs of rows, and dS as it is and in pairs of keys.
#pragma once

#include "cpu/backward.h"
#include "cpu/bf16_operands.h"

namespace flashjit::device {

template <class Spec, class Config, class BlockProduct>
class Bf16Backward : BlockProduct {
  static constexpr int head_dim = Spec::head_dim, head_dim_v = Spec::head_dim_v, block_n = Config::block_n;
  static constexpr int group = amx_unit, unit = bf16_backward_unit, row_groups = unit / group;
  static_assert(group == cpu_backward_group && block_n % group == 0 && block_n <= 32 * group);
  using Gradient = GradientOf<Spec>;
  using Mask = typename Spec::Mask;
  using Score = typename Spec::Score;
  using ScoreGradient = device::ScoreGradient<Score>;

  template <int columns>
  struct Heads {
    static constexpr int head_dim = columns, head_dim_v = columns;
  };
  using OfK = Bf16Operands<Heads<head_dim>, Config>;
  using OfV = Bf16Operands<Heads<head_dim_v>, Config>;
  static constexpr int k_blocks = OfK::k_tiles, v_blocks = OfV::k_tiles;  // blocks of 32 columns
  static constexpr int tile = OfK::tile, pair = 2 * tile, tile_bytes = 2 * tile, sums = group * group;
  using BlockProduct::multiply;

  // Scratch, in this order. A group's operand is two tiles for each block of columns.
  float *dk, *dv;                       // [block_n / 32][k_blocks], [v_blocks] of sums
  float *s, *dp;                        // sums: scores, dO V^T
  bf16 *k, *k_columns, *v;              // of the block's groups of keys; K^T
  bf16 *q, *q_pairs, *d_o, *d_o_pairs;  // of the unit's groups of rows
  bf16 *p, *ds;                         // [block_n / 32][row_groups] of two tiles
  bf16* ds_pairs;                       // [block_n / 32] of two tiles
  u32 *multiplier, *addend;             // [unit]; with dropout only
  u32* column;                          // [block_n]; with dropout only
  float* raw;                           // sums: scores before formulas, if these have derivatives
  u32 nonfinite_k = 0;                  // bit i: of the block's group i

 public:
  FLASHJIT_FN explicit Bf16Backward(void* scratch) {
    constexpr int k_row = k_blocks * 32, v_row = v_blocks * 32;
    dk = static_cast<float*>(scratch), dv = dk + block_n * k_row;
    s = dv + block_n * v_row, dp = s + sums;
    k = reinterpret_cast<bf16*>(dp + sums), k_columns = k + block_n * k_row;
    v = k_columns + block_n * k_row, q = v + block_n * v_row;
    q_pairs = q + unit * k_row, d_o = q_pairs + unit * k_row, d_o_pairs = d_o + unit * v_row;
    p = d_o_pairs + unit * v_row, ds = p + block_n * unit, ds_pairs = ds + block_n * unit;
    multiplier = reinterpret_cast<u32*>(ds_pairs + block_n * group), addend = multiplier + unit;
    column = addend + unit;
    raw = reinterpret_cast<float*>(column + block_n);
  }

  FLASHJIT_FN void run(const CpuBackwardParams& params, const Problem& slot, int first, float* dq) {
    const int heads = params.num_heads_q / params.num_heads_kv;
    const Problem any = problem_in<Spec>(params, slot, slot.head_q);
    const Span keys = {first, min(first + block_n, any.seqlen_k)};
    clear(dk, block_n * 32 * (k_blocks + v_blocks));  // dv follows
    if (!keys.empty()) {
      pack_keys(params, any, keys);
      if constexpr (Spec::dropout) make_column_words<Spec>(params, slot.batch, keys, column);
      for (int head = slot.head_q; head < slot.head_q + heads; ++head) {
        const Problem problem = problem_in<Spec>(params, slot, head);
        const Mask mask(params, problem);
        BlockWalk<Queries, Mask> walk(mask, keys, unit);
        for (Block block; walk.next(block);)
          add_unit(params, problem, mask, intersect(block_span(block.index, unit), {0, problem.seqlen_q}),
                   keys, dq);
      }
    }
    write_keys(params, slot, first);
  }

  __attribute__((noinline)) void find_sums(const CpuBackwardParams& params, const Problem& problem,
                                           Span all_rows) {
    const Mask mask(params, problem);
    alignas(64) float maxima[group], row_sums[group];
    for (int row = all_rows.begin; row < all_rows.end; row += group) {
      const Span rows = {row, min(row + group, all_rows.end)};
      for (int i = 0; i < group; ++i) maxima[i] = minus_infinity, row_sums[i] = 0;
      OfK::pack_q(group, unit_rows(params.q, problem.q_offset(params.q), rows), nullptr, q);
      const Span seen = intersect(mask.hull(Keys{}, rows), {0, problem.seqlen_k});
      for (int first = seen.begin / block_n * block_n; first < seen.end; first += block_n) {
        const Span keys = intersect({first, first + block_n}, {0, problem.seqlen_k});
        const Span kept = intersect(seen, keys);
        pack_keys(params, problem, keys);
        for (u32 left = touched(mask, rows, kept, first); left != 0; left &= left - 1) {
          const int key_group = __builtin_ctz(left), of_group = first + key_group * group;
          const Span some = intersect(kept, {of_group, of_group + group});
          make_scores(params, problem, mask, rows, some, 0, key_group, of_group);
          add_scores(group, Score::scale_log2(params), s, group, {maxima, row_sums});
        }
      }
      set_sums<Spec>(params, problem, workspace_row<Spec>(params, problem) + row, rows.size(),
                     {maxima, row_sums});
    }
  }

  // A group of dQ is [k_blocks][32 columns][group].
  template <class To>
  __attribute__((noinline)) static void write_dq(const float* sum, float scale, int count, To* dq,
                                                 i64 stride) {
    constexpr int together = 4 / sizeof(To);
    for (int column = 0; column < head_dim; column += 4 * together, sum += 4 * together * group)
      for (int row = 0; row < count; row += lanes) {
        WordVec words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Vec values[together];
#pragma unroll
          for (int j = 0; j < together; ++j) {
            values[j] = load(sum + (i * together + j) * group + row) * scale;
            if constexpr (Spec::batch_invariant) values[j] += 0.0f;  // 0 of -0
          }
          words[i] = row_words<To>(values);
        }
        transpose4(words);
        for (int i = 0; i < min(lanes, count - row); ++i)
          __builtin_memcpy(dq + (row + i) * stride + column,
                           reinterpret_cast<const char*>(&words[i % 4]) + i / 4 * 16, 16);
      }
  }

 private:
  template <class View>
  FLASHJIT_FN static UnitRows<bf16> unit_rows(const View& view, i64 offset, Span rows) {
    return {static_cast<const bf16*>(view.data) + offset, view.row_stride, 0, 1, rows.begin, rows.size()};
  }

  __attribute__((noinline)) void pack_keys(const CpuBackwardParams& params, const Problem& problem,
                                           Span keys) {
    const UnitRows<bf16> rows_k = unit_rows(params.k, problem.k_offset(params.k), keys);
    const UnitRows<bf16> rows_v = unit_rows(params.v, problem.k_offset(params.v), keys);
    nonfinite_k = 0;
    for (int i = 0; i * group < keys.size(); ++i) {
      const int count = min(group, keys.size() - i * group);
      const StridedRows<bf16> of_k = {rows_k[i * group], rows_k.row_stride};
      OfK::pack_k(of_k, count, k + i * k_blocks * pair);
      if (!OfK::pack_v(of_k, count, k_columns + i * k_blocks * pair)) nonfinite_k |= 1u << i;
      OfV::pack_k(StridedRows<bf16>{rows_v[i * group], rows_v.row_stride}, count, v + i * v_blocks * pair);
    }
  }

  // Packs a group's rows in pairs of rows: [blocks][2] tiles of 32 rows x 16 columns. Returns whether all of
  // it is finite.
  template <int columns>
  __attribute__((noinline)) static bool pack_pairs(const UnitRows<bf16>& rows, bf16* to) {
    using Words8 = u32 __attribute__((vector_size(32)));
    using Halves8 = unsigned short __attribute__((vector_size(32)));
    const RowPointers<group, columns> row(rows, 0);
    Halves8 largest{};
    for (int i = 0; i < group; i += 2)
      for (int c = 0; c < round_up(columns, 32); c += 8) {
        Words8 words{};
        if (c < columns)
          words = __builtin_convertvector(load_unaligned<Short8>(row.data[i] + c), Words8) |
                  __builtin_convertvector(load_unaligned<Short8>(row.data[i + 1] + c), Words8) << 16;
        const Halves8 magnitude = reinterpret_cast<Halves8>(words) << 1;
        largest = magnitude > largest ? magnitude : largest;
        __builtin_memcpy(to + c / 16 * tile + i / 2 * 32 + c % 16 * 2, &words, sizeof words);
      }
    return __builtin_reduce_max(largest) < 0xff00;
  }

  // out += a b for 32 terms, without terms whose weight is zero: NaN and infinity reach only sums that give
  // them a weight. The weights are a or b.
  template <bool weights_are_b>
  __attribute__((noinline)) static void add_weighted(const bf16* a, i64 a_next, const bf16* b, float* out) {
    for (int i = 0; i < group; ++i)
      for (int term = 0; term < group; ++term) {
        const u32 bits = a[i / 16 * a_next / 2 + i % 16 * 32 + term].bits;
        const Vec x = splat(__builtin_bit_cast(float, bits << 16));
        for (int j = 0; j < group; j += lanes) {
          WordVec pairs;
          __builtin_memcpy(&pairs, b + j / 16 * tile + term / 2 * 32 + j % 16 * 2, sizeof pairs);
          const Vec y = reinterpret_cast<Vec>(term % 2 != 0 ? pairs & 0xffff0000u : pairs << 16);
          float* const sum = out + i * group + j;
          store(sum, select((weights_are_b ? y : x) == 0.0f, load(sum), fma(x, y, load(sum))));
        }
      }
  }

  // out += a b for all columns: [blocks] of sums. The operands of `blocks` blocks of columns lie side by side
  // where the columns are. Terms of `selective` are added with care.
  template <int blocks, bool columns_are_a>
  FLASHJIT_FN static void add_product(const bf16* a, i64 a_step, const bf16* b, i64 b_step, u32 terms,
                                      u32 selective, float* out) {
    for (int i = 0; i < blocks; ++i, out += sums, (columns_are_a ? a : b) += pair) {
      if (terms & ~selective) multiply(a, tile_bytes, a_step, b, b_step, terms & ~selective, out, true);
      for (u32 left = terms & selective; left != 0; left &= left - 1) {
        const int term = __builtin_ctz(left);
        add_weighted<columns_are_a>(a + term * a_step / 2, tile_bytes, b + term * b_step / 2, out);
      }
    }
  }

  // s = the final scores of the unit's group of rows `row_group` and of a group of keys, of which the mask
  // may keep `kept`; -inf where it drops them. raw = those before formulas, if these have derivatives.
  // `first`: the group's first key.
  __attribute__((noinline)) void make_scores(const CpuBackwardParams& params, const Problem& problem,
                                             const Mask& mask, Span rows, Span kept, int row_group,
                                             int key_group, int first) const {
    multiply(k + key_group * k_blocks * pair, k_blocks * tile_bytes, tile_bytes,
             q + row_group * k_blocks * pair, 2 * tile_bytes, low_bits(k_blocks), s, false);
    float* const seen = s + (kept.begin - first) * group;
    if constexpr (ScoreGradient::changes) copy(raw, s, sums);
    if constexpr (Score::changes) Score::modify_rows(params, problem, group, seen, rows, kept, 1);
    if (!mask.whole(rows, kept)) {
      if constexpr (has_formula<Mask>)
        mask_rows(group, mask, seen, rows, kept, problem.head_q, 1);
      else
        apply_mask(group, mask, seen, rows, kept, 1);
    }
    leave_out(group, s, 0, kept.begin - first);
    leave_out(group, s, kept.end - first, group);
  }

  // Adds the share of `rows`, of one unit.
  __attribute__((noinline)) void add_unit(const CpuBackwardParams& params, const Problem& problem,
                                          const Mask& mask, Span rows, Span keys, float* dq) const {
    u32 used[block_n / group] = {};  // bit i: the rows' group i
    u32 nonfinite_q = 0, nonfinite_d_o = 0;
    const i64 at = workspace_row<Spec>(params, problem);
    if constexpr (Spec::dropout)
      if (!rows.empty()) make_row_words<Spec>(params, problem, rows, multiplier, addend);
    for (int i = 0; rows.begin + i * group < rows.end; ++i) {
      const int row = rows.begin + i * group;
      const Span ours = {row, min(row + group, rows.end)}, kept = intersect(mask.hull(Keys{}, ours), keys);
      const u32 groups = touched(mask, ours, kept, keys.begin);
      if (groups == 0) continue;
      const bool moves = any_moves(params.maxima + at + row, group);
      const UnitRows<bf16> of_q = unit_rows(params.q, problem.q_offset(params.q), ours);
      const UnitRows<bf16> of_d_o = unit_rows(params.d_o, problem.q_offset(params.d_o), ours);
      OfK::pack_q(group, of_q, nullptr, q + i * k_blocks * pair);
      OfV::pack_q(group, of_d_o, nullptr, d_o + i * v_blocks * pair);
      if (!pack_pairs<head_dim>(of_q, q_pairs + i * k_blocks * pair)) nonfinite_q |= 1u << i;
      if (!pack_pairs<head_dim_v>(of_d_o, d_o_pairs + i * v_blocks * pair)) nonfinite_d_o |= 1u << i;
      float* const dq_of_rows = dq + (at + row) * cpu_backward_row(head_dim);
      for (u32 left = groups; left != 0; left &= left - 1) {
        const int key_group = __builtin_ctz(left), first = keys.begin + key_group * group;
        const Span some = intersect(kept, {first, first + group});
        make_scores(params, problem, mask, ours, some, i, key_group, first);
        multiply(v + key_group * v_blocks * pair, v_blocks * tile_bytes, tile_bytes,
                 d_o + i * v_blocks * pair, 2 * tile_bytes, low_bits(v_blocks), dp, false);
        if (moves) move_scores(params.maxima + at + row, params.offsets + at + row, group, s, group);
        if constexpr (ScoreGradient::changes) {
          make_gradients(params, at + row, i, key_group);
          ScoreGradient::apply(params, problem, group, raw + (some.begin - first) * group,
                               dp + (some.begin - first) * group, ours, some);
        }
        make_weights(params, at + row, i, key_group);
        fetch_share(dq_of_rows, key_group);
        used[key_group] |= 1u << i;
      }
      add_product<k_blocks, true>(k_columns, k_blocks * 2 * tile_bytes, ds_pairs, 2 * tile_bytes, groups,
                                  nonfinite_k, dq_of_rows);
    }
    for (int i = 0; i < block_n / group; ++i) {
      if (used[i] == 0) continue;
      add_product<v_blocks, false>(p + i * row_groups * pair, 2 * tile_bytes, d_o_pairs,
                                   v_blocks * 2 * tile_bytes, used[i], nonfinite_d_o,
                                   dv + i * v_blocks * sums);
      add_product<k_blocks, false>(ds + i * row_groups * pair, 2 * tile_bytes, q_pairs,
                                   k_blocks * 2 * tile_bytes, used[i], nonfinite_q, dk + i * k_blocks * sums);
    }
  }

  // Fetches part of a group of dQ into the cache, which has as many parts as a block has groups of keys.
  FLASHJIT_FN static void fetch_share(const float* dq, int part) {
    constexpr int share = k_blocks * sums / (block_n / group), line = 16;
    for (int i = 0; i < share; i += line) fetch(dq + part * share + i);
  }

  // Bit i: the rows may keep keys of group i of the block, which begins with key `first`.
  FLASHJIT_FN static u32 touched(const Mask& mask, Span rows, Span kept, int first) {
    if (rows.empty() || kept.empty()) return 0;
    u32 groups = 0;
    for (int i = (kept.begin - first) / group; first + i * group < kept.end; ++i)
      if (Mask::row_intervals ||
          touches(mask, rows, intersect(kept, {first + i * group, first + (i + 1) * group})))
        groups |= 1u << i;
    return groups;
  }

  // The upper halves of all words.
  FLASHJIT_FN static WordVec joined(WordVec low, WordVec high) {
    return reinterpret_cast<WordVec>(__builtin_shufflevector(
        reinterpret_cast<HalfVec>(low), reinterpret_cast<HalfVec>(high), 1, 3, 5, 7, 9, 11, 13, 15, 17, 19,
        21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63));
  }

  // Replaces scores by weights, which dropout changes, and dO V^T by the gradients of final scores.
  __attribute__((noinline)) void make_gradients(const CpuBackwardParams& params, i64 row, int row_group,
                                                int key_group) const {
    const Vec scale = splat(Score::scale_log2(params));
    for (int i = 0; i < group; i += lanes) {
      const Vec offset = load(params.offsets + row + i), delta = load(params.deltas + row + i);
      [[maybe_unused]] WordVec by, plus;
      if constexpr (Spec::dropout)
        by = load(multiplier + row_group * group + i), plus = load(addend + row_group * group + i);
      for (int key = 0; key < group; ++key) {
        float *const weight = s + key * group + i, *const gradient = dp + key * group + i;
        const Vec e = exp2_to_bf16(weight_exponent(load(weight), scale, offset));
        Vec kept = e, change = load(gradient);
        if constexpr (Spec::dropout) {
          const IntVec keeps = by * column[key_group * group + key] + plus >= params.dropout.below;
          kept = select(keeps, e * params.dropout.scale, Vec{});
          change = select(keeps, change * params.dropout.scale, Vec{});
        }
        store(weight, kept);
        store(gradient, select(e == 0.0f, Vec{}, e * (change - delta)));
      }
    }
  }

  // Makes weights, which dropout changes, of the scores, and dS of dO V^T, as bf16.
  __attribute__((noinline)) void make_weights(const CpuBackwardParams& params, i64 row, int row_group,
                                              int key_group) const {
    constexpr u32 half = 0x8000;  // half a unit in the last place of bf16
    const Vec scale = splat(Score::scale_log2(params));
    const float *scores = s, *gradients = dp;
    bf16* to_p = p + (key_group * row_groups + row_group) * pair;
    bf16* to_ds = ds + (key_group * row_groups + row_group) * pair;
    bf16* to_pairs = ds_pairs + key_group * pair;
    Vec offset[2], delta[2];
    WordVec by[2], plus[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      offset[i] = load(params.offsets + row + i * lanes);
      delta[i] = load(params.deltas + row + i * lanes);
      if constexpr (Spec::dropout) {
        by[i] = load(multiplier + row_group * group + i * lanes);
        plus[i] = load(addend + row_group * group + i * lanes);
      }
    }
#pragma nounroll
    for (int key = 0; key < group; key += 2) {
      WordVec changed[2][2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        WordVec weights[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Vec kept = load(scores + i * lanes), gradient = load(gradients + i * lanes);
          if constexpr (!ScoreGradient::changes) {
            const Vec e = exp2_to_bf16(weight_exponent(kept, scale, offset[i]));
            kept = e;
            if constexpr (Spec::dropout) {
              const IntVec keeps =
                  by[i] * column[key_group * group + key + j] + plus[i] >= params.dropout.below;
              kept = select(keeps, e * params.dropout.scale, Vec{});
              gradient = select(keeps, gradient * params.dropout.scale, Vec{});
            }
            gradient = select(e == 0.0f, Vec{}, e * (gradient - delta[i]));
          }
          weights[i] = reinterpret_cast<WordVec>(kept) + half;
          changed[j][i] = reinterpret_cast<WordVec>(gradient) + half;
        }
        store(to_p + j * group, joined(weights[0], weights[1]));
        store(to_ds + j * group, joined(changed[j][0], changed[j][1]));
        scores += group, gradients += group;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) store(to_pairs + i * tile, upper_halves(changed[0][i], changed[1][i]));
      to_p += 2 * group, to_ds += 2 * group, to_pairs += group;
    }
  }

  // Writes dK and dV of the block's keys, padding included: its sums are 0.
  __attribute__((noinline)) void write_keys(const CpuBackwardParams& params, const Problem& slot,
                                            int first) const {
    Gradient* const to_k = static_cast<Gradient*>(params.dk.data) + slot.k_offset(params.dk);
    Gradient* const to_v = static_cast<Gradient*>(params.dv.data) + slot.k_offset(params.dv);
    for (int key = first; key < min(first + block_n, slot.seqlen_k); ++key) {
      const int of_block = key - first, at = of_block % group * group;
      for (int i = 0; i < k_blocks; ++i)
        write_row<Spec::batch_invariant>(dk + (of_block / group * k_blocks + i) * sums + at, params.scale,
                                         min(32, head_dim - 32 * i),
                                         to_k + key * params.dk.row_stride + 32 * i);
      for (int i = 0; i < v_blocks; ++i)
        write_row<Spec::batch_invariant>(dv + (of_block / group * v_blocks + i) * sums + at, 1.0f,
                                         min(32, head_dim_v - 32 * i),
                                         to_v + key * params.dv.row_stride + 32 * i);
    }
  }
};

}  // namespace flashjit::device
