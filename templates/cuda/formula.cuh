// Formulas on the accumulators of GPUs' kernels.
#pragma once

#include "cuda/online_softmax.cuh"
#include "shared/formula_mask.h"

namespace flashjit::device {

// A key: that of a thread's first column, and a distance that the compiler knows. A conversion to float32
// takes as long as an exponential, so columns share one.
struct DistantKey {
  int base, distance;
  FLASHJIT_FN operator int() const { return plus(base, distance); }
};
FLASHJIT_FN DistantKey plus(DistantKey a, int b) {
  return {plus(a.base, b), a.distance};
}
FLASHJIT_FN DistantKey plus(int a, DistantKey b) {
  return {plus(a, b.base), b.distance};
}
FLASHJIT_FN DistantKey plus(DistantKey a, DistantKey b) {
  return {plus(a.base, b.base), a.distance + b.distance};
}
FLASHJIT_FN DistantKey minus(DistantKey a, int b) {
  return {minus(a.base, b), a.distance};
}
FLASHJIT_FN DistantKey minus(int a, DistantKey b) {
  return {minus(a, b.base), -b.distance};
}
FLASHJIT_FN DistantKey minus(DistantKey a, DistantKey b) {
  return {minus(a.base, b.base), a.distance - b.distance};
}
FLASHJIT_FN float real_of(DistantKey a) {
  return plus(real_of(a.base), real_of(a.distance));
}
FLASHJIT_FN Integer<int> whole(Integer<DistantKey> a) {
  return Integer<int>(a.v);
}

// A score before the first formula: a product of q and k, and the factors that it will be multiplied by. So
// they are multiplied once for many scores, and a multiply-add takes the last one.
struct ScaledScore {
  float product, factor;
  FLASHJIT_FN operator float() const { return __fmul_rn(product, factor); }
};
FLASHJIT_FN ScaledScore times(ScaledScore a, float b) {
  return {a.product, __fmul_rn(a.factor, b)};
}
FLASHJIT_FN ScaledScore times(float a, ScaledScore b) {
  return {b.product, __fmul_rn(a, b.factor)};
}
FLASHJIT_FN float times(ScaledScore a, ScaledScore b) {
  return __fmul_rn(float(a), float(b));
}
FLASHJIT_FN float plus(ScaledScore a, float b) {
  return __fmaf_rn(a.product, a.factor, b);
}
FLASHJIT_FN float plus(float a, ScaledScore b) {
  return __fmaf_rn(b.product, b.factor, a);
}
FLASHJIT_FN float plus(ScaledScore a, ScaledScore b) {
  return plus(a, float(b));
}
FLASHJIT_FN float minus(ScaledScore a, float b) {
  return __fmaf_rn(a.product, a.factor, -b);
}
FLASHJIT_FN float minus(float a, ScaledScore b) {
  return __fmaf_rn(-b.product, b.factor, a);
}
FLASHJIT_FN float minus(ScaledScore a, ScaledScore b) {
  return minus(a, float(b));
}

// Errors: exp 2^-22 (1 + |a|) of the result; log 2^-21 (1 + |result|); tanh 2^-16; inverse and quotient 2^-22
// of the result. Operands and results below 2^-126 may count as zeros.
template <class V>
FLASHJIT_FN Real<float> exp(Real<V> a) {
  return Real<float>(ex2_approx(__fmul_rn(a.v, 1.44269504f)));
}
template <class V>
FLASHJIT_FN Real<float> log(Real<V> a) {
  return Real<float>(__fmul_rn(lg2_approx(a.v), ln_2));
}
// tanh(|a|) = (1 - u) / (1 + u) with u = exp(-2 |a|): a minimax polynomial in u, whose error is 1.4e-5,
// stands for the quotient. It is 0 at u = 1. One special function, as for the softmax itself, and no
// division: special functions are what scores wait for. tanh.approx errs by 2^-11.
template <class V>
FLASHJIT_FN Real<float> tanh(Real<V> a) {
  const float x = times(a.v, 2.88539008f), u = ex2_approx(-magnitude(x));
  float p = 0.148172349f;
  p = __fmaf_rn(p, u, -0.66094172f);
  p = __fmaf_rn(p, u, 1.35460699f);
  p = __fmaf_rn(p, u, -1.81685114f);
  p = __fmaf_rn(p, u, 1.97354913f);
  p = __fmaf_rn(p, u, -1.99852192f);
  p = __fmaf_rn(p, u, 0.99998641f);
  return Real<float>(__uint_as_float(__float_as_uint(p) ^ (__float_as_uint(x) & 0x80000000u)));
}
template <class V>
FLASHJIT_FN Real<float> sqrt(Real<V> a) {
  return Real<float>(__fsqrt_rn(a.v));
}
template <class V>
FLASHJIT_FN Real<float> inverse(Real<V> a) {
  return Real<float>(rcp_approx(a.v));
}
template <class A, class B>
FLASHJIT_FN Real<float> quotient(Real<A> a, Real<B> b) {
  return Real<float>(__fmul_rn(a.v, rcp_approx(b.v)));
}
// Within two units in the last place.
template <class V>
FLASHJIT_FN Real<float> precise_exp(Real<V> a) {
  return Real<float>(expf(a.v));
}
template <class V>
FLASHJIT_FN Real<float> precise_log(Real<V> a) {
  return Real<float>(logf(a.v));
}
template <class V>
FLASHJIT_FN Real<float> precise_tanh(Real<V> a) {
  return Real<float>(tanhf(a.v));
}
template <class V>
FLASHJIT_FN Real<float> precise_sqrt(Real<V> a) {
  return Real<float>(__fsqrt_rn(a.v));
}

// After some of a thread's columns: keeps the compiler from loading the elements of all columns at once, for
// which there are no registers.
template <bool loads>
FLASHJIT_FN void end_of_columns(int i) {
  if (loads && i % 2 == 1) __syncwarp();
}

// The exponents of capped scores, cap * tanh(s * scale / cap), where the operand of tanh is at most 3/4: s
// times a minimax polynomial in s * s, whose relative error is 2^-16.4, precise 2^-25.
template <bool precise>
class CappedNearZero {
  static constexpr int terms = precise ? 6 : 4;
  static constexpr float farthest = 0.75f;

 public:
  static constexpr bool by_thread = false;

  CappedNearZero() = default;
  // cap_log2: in exponents of 2.
  FLASHJIT_FN CappedNearZero(float scale, float cap_log2) {
    constexpr float fast[] = {0.999988984f, -0.332696709f, 0.127426971f, -0.0354527862f};
    constexpr float exact[] = {0.999999971f,   -0.333329589f, 0.13325406f,
                               -0.0533444305f, 0.0195829085f, -0.00471625733f};
    const float factor = scale / cap_log2 * 1.44269504f;
    float power = factor;
#pragma unroll
    for (int i = 0; i < terms; ++i, power *= factor * factor)
      term_[i] = (precise ? exact : fast)[i] * power * cap_log2;
    // Powers of other factors may leave the range of float32.
    const bool in_range = fabsf(factor) > 0x1p-8f && fabsf(factor) < 0x1p8f;
    limit_ = in_range ? farthest / fabsf(factor) : -1.f;
    cap_log2_ = cap_log2;
  }
  // The largest magnitude of s. Exponents are at most 50 then or, where weights are fp16, 13: far from the
  // ends of the range. tanh(x) <= x.
  FLASHJIT_FN float limit(bf16) const { return limit_ * fminf(1.f, 50.f / (farthest * cap_log2_)); }
  FLASHJIT_FN float limit(fp16) const { return limit_ * fminf(1.f, 13.f / (farthest * cap_log2_)); }

  FLASHJIT_FN float relative(int, float s, float, float reference) const {
    const float square = __fmul_rn(s, s);
    float p = term_[terms - 1];
#pragma unroll
    for (int i = terms - 2; i >= 0; --i) p = __fmaf_rn(p, square, term_[i]);
    return __fmaf_rn(s, p, -reference);
  }

 private:
  float term_[terms], limit_, cap_log2_;
};

// Formulas of scores. Fragments are those of online_softmax.cuh.
template <class Params, class... Formulas>
class FormulaScore {
  using Chain = ScoreChain<Formulas...>;
  using Row = FormulaRow<int, int, typename FormulaProblemOf<Params>::type>;

 public:
  static constexpr bool changes = true;
  static constexpr bool bounds = sizeof...(Formulas) == 1 && (Formulas::caps_score || ...);

  // The softmax multiplies changed scores by this. They are in natural units. A soft cap leaves its
  // multiplication by the cap to the softmax, so the factor then contains the cap. The factor must not be 0,
  // since minus infinity times 0 is NaN.
  template <class Base>
  FLASHJIT_FN static float scale_log2(const Base& p) {
    return scale(p) * 1.44269504f;
  }
  template <class Base>
  FLASHJIT_FN static float scale(const Base& p) {
    if constexpr (Chain::caps) {
      const FormulaScalars scalars{static_cast<const Params&>(p).formulas};
      return fmaxf(Chain::cap(scalars).v, 1e-30f);
    }
    return 1;
  }

  template <class Base>
  FLASHJIT_FN FormulaScore(const Base& p, const Problem& of)
      : problem_(p, static_cast<const Params&>(p).formulas, of) {
    if constexpr (bounds) near_zero_ = {problem_.params.scale, scale_log2(p)};
  }

  // The values of the thread's two rows that no key changes. A kernel asks for it ahead, as it may come from
  // memory.
  struct OfRows {
    typename Chain::template OfRow<Row> row_0, row_8;
  };
  template <class Rows, class Heads>
  FLASHJIT_FN OfRows of_rows(const Rows& rows, const Heads& heads) const {
    using OfRow = typename Chain::template OfRow<Row>;
    return {OfRow(row(rows, heads, 0)), OfRow(row(rows, heads, 8))};
  }

  // A formula that is linear in the key costs a multiply-add for each score; what the key does not change
  // becomes a shift of the row. A magnitude is linear on either side of the row's own key.
  static constexpr bool tilts = sizeof...(Formulas) == 1 && (Formulas::tilts || ...);
  // Of a tile: for each of the thread's rows the tilt and the key that it begins from, and the lowest and the
  // highest such key of the warp's rows.
  struct Tilts {
    float tilt[2];
    int from[2], lowest, highest;
  };
  template <class Rows, class Heads>
  FLASHJIT_FN Tilts tilts_of(const Rows& rows, const Heads& heads) const {
    using Only = typename Chain::Front;
    Tilts made;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Row at = row(rows, heads, 8 * r);
      made.from[r] = problem_.own_key(Only::from(at).v);
      made.tilt[r] = Only::tilt(at, Only::of_row(at)).v;
    }
    made.lowest = min(made.from[0], made.from[1]);
    made.highest = max(made.from[0], made.from[1]);
#pragma unroll
    for (int lanes = 16; lanes >= 4; lanes /= 2) {  // four lanes share their rows
      made.lowest = min(made.lowest, __shfl_xor_sync(0xffffffff, made.lowest, lanes));
      made.highest = max(made.highest, __shfl_xor_sync(0xffffffff, made.highest, lanes));
    }
    return made;
  }
  template <int columns, class Rows, class Heads>
  FLASHJIT_FN Shifted tilt(float* scores, const Tilts& given, const Rows& rows, const Heads& heads,
                           int first_key, int lane) const {
    constexpr bool by_magnitude = Chain::Front::tilts_by_magnitude;
    constexpr float log2_e = 1.44269504f;
    const float scale = problem_.params.scale;
    const bool before = by_magnitude && first_key + columns - 1 <= given.lowest;
    const bool linear = !by_magnitude || before || first_key >= given.highest;
    if (!linear || !(scale > 1e-30f)) {  // such a scale has no inverse
      modify<columns>(scores, of_rows(rows, heads), rows, heads, first_key, lane);
      return {log2_e, {0, 0}};
    }
    float tilt[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      tilt[r] = before ? -given.tilt[r] : given.tilt[r];
      shift[r] = __fmul_rn(tilt[r], static_cast<float>(first_key + lane % 4 * 2 - given.from[r])) * log2_e;
      tilt[r] *= rcp_approx(scale);
    }
#pragma unroll
    for (int i = 0; i < columns / 2; ++i)
      scores[i] = __fmaf_rn(tilt[i / 2 % 2], static_cast<float>(i / 4 * 8 + i % 2), scores[i]);
    return {scale * log2_e, {shift[0], shift[1]}};
  }

  // A cap of the score itself. Few scores come near it. A block whose scores are all nearer to 0 takes a
  // polynomial instead of a special function for each, and no maxima: its weights stay in range as they are.
  // Weight: the type in which they are multiplied with V.
  template <class Weight, int registers>
  FLASHJIT_FN bool are_near_zero(const float* scores) const {
    float largest[4] = {};
#pragma unroll
    for (int i = 0; i < registers; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(scores[i]));
    const float limit = near_zero_.limit(Weight{});
    return !__any_sync(0xffffffff,
                       !(fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3])) <= limit));
  }
  FLASHJIT_FN const auto& near_zero() const { return near_zero_; }

  // Scores of a block of `columns` keys from `first_key` on.
  template <int columns, class Rows, class Heads>
  FLASHJIT_FN void modify(float* scores, const OfRows& of_rows, const Rows& rows, const Heads& heads,
                          int first_key, int lane) const {
    const int base = first_key + lane % 4 * 2;
    const float scale = problem_.params.scale;
    const Row row_0 = row(rows, heads, 0), row_8 = row(rows, heads, 8);
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = scores[4 * i + e];
        score =
            Chain::template apply<true>(FormulaKey(e < 2 ? row_0 : row_8, DistantKey{base, 8 * i + e % 2}),
                                        e < 2 ? of_rows.row_0 : of_rows.row_8, ScaledScore{score, scale});
      }
      end_of_columns<(Formulas::loads || ...)>(i);
    }
  }

 private:
  template <class Rows, class Heads>
  FLASHJIT_FN Row row(const Rows& rows, const Heads& heads, int r) const {
    return Row(problem_, rows(r), heads(r));
  }

  struct Nothing {};
  typename FormulaProblemOf<Params>::type problem_;
  typename Choose<bounds, CappedNearZero<(Formulas::precise || ...)>, Nothing>::type near_zero_;
};

// Sets the scores of a block that a mask with formulas excludes to minus infinity. A block that is partly
// seen because of a formula is mostly whole for the other masks.
template <int tile_rows, int keys, int columns = keys, class Part, class Rows, class Heads>
FLASHJIT_FN void mask_part(float* scores, const Part& mask, const Rows& rows, const Heads& heads,
                           const Block& block, int lane, int part = 0) {
  if constexpr (has_formula<Part>)
    mask_elements<tile_rows, keys, columns>(scores, mask, rows, heads, block, lane, part);
  else if (const int first = first_key_of<keys, columns>(block, part);
           !Part::row_intervals || !mask.whole({rows(0), rows(8) + 1}, {first, first + columns}))
    mask_scores<tile_rows, keys, columns>(scores, mask, rows, block, lane, part);
}
template <int tile_rows, int keys, int columns = keys, class A, class B, class Rows, class Heads>
FLASHJIT_FN void mask_elements(float* scores, const Both<A, B>& mask, const Rows& rows, const Heads& heads,
                               const Block& block, int lane, int part = 0) {
  if constexpr (has_formula<A> || has_formula<B>) {
    mask_part<tile_rows, keys, columns>(scores, mask.a, rows, heads, block, lane, part);
    mask_part<tile_rows, keys, columns>(scores, mask.b, rows, heads, block, lane, part);
  } else {
    mask_scores<tile_rows, keys, columns>(scores, mask, rows, block, lane, part);
  }
}
// A block that the lists keep whole is here only because of another mask.
template <int tile_rows, int keys, int columns = keys, class Blocks, class Others, class Rows, class Heads>
FLASHJIT_FN void mask_elements(float* scores, const Listed<Blocks, Others>& mask, const Rows& rows,
                               const Heads& heads, const Block& block, int lane, int part = 0) {
  if constexpr (!has_formula<Others>) {
    mask_scores<tile_rows, keys, columns>(scores, mask, rows, block, lane, part);
  } else {
    if (block.found != everywhere && block.found != by_masks)
      mask_scores<tile_rows, keys, columns>(scores, mask.blocks, rows, block, lane, part);
    if (block.found == by_masks || block.found == not_found)
      mask_part<tile_rows, keys, columns>(scores, mask.others, rows, heads, block, lane, part);
  }
}
template <int tile_rows, int keys, int columns = keys, class Formula, class Params, class Rows, class Heads>
FLASHJIT_FN void mask_elements(float* scores, const FormulaMask<Formula, Params>& mask, const Rows& rows,
                               const Heads& heads, const Block& block, int lane, int part = 0) {
  const int base = first_key_of<keys, columns>(block, part) + lane % 4 * 2;
  const FormulaRow row_0(mask.problem, rows(0), heads(0)), row_8(mask.problem, rows(8), heads(8));
  [[maybe_unused]] const auto of_row_0 = Formula::of_row(row_0), of_row_8 = Formula::of_row(row_8);
#pragma unroll
  for (int i = 0; i < columns / 8; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const FormulaKey at(e < 2 ? row_0 : row_8, plus(base, 8 * i + e % 2));
      bool kept;
      if constexpr (Formula::by_key)
        kept = Formula::value(at, Formula::of_key(at)).v;
      else
        kept = Formula::value(at, e < 2 ? of_row_0 : of_row_8).v;
      if (!kept) scores[4 * i + e] = minus_infinity;
    }
    end_of_columns<Formula::loads>(i);
  }
}

// A logit of each query head, with which the sum of a row's softmax begins.
template <class Params>
struct SinkLogits {
  static constexpr bool exist = true;

  template <class Base>
  FLASHJIT_FN static float natural(const Base& p, int head) {
    const FormulaParams& params = static_cast<const Params&>(p).formulas;
    return params.sink_logits[head * params.sink_stride];
  }
  // In the scale of exponents of 2.
  template <class Base>
  FLASHJIT_FN static float log2(const Base& p, int head) {
    return natural(p, head) * 1.44269504f;
  }
  // The same less a score. The difference comes first: next to far scores the roundings of both products
  // would exceed it.
  template <class Score, class Base>
  FLASHJIT_FN static float log2_above(const Base& p, int head, float score) {
    float scale = static_cast<const Params&>(p).formulas.scale;
    if constexpr (Score::changes) scale = Score::scale(p);
    return __fmaf_rn(-score, scale, natural(p, head)) * 1.44269504f;
  }
};

}  // namespace flashjit::device
