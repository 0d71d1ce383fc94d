// How far a correct kernel's output may be from the exact one, element by element.
//
// Exact:   s_j = scale q.k_j,  p_j = exp(s_j) / sum_i exp(s_i),  o_c = sum_j p_j v_jc,
//          lse = ln sum_j exp(s_j), over the n keys j that the row keeps, from the inputs as stored.
// Kernel:  scores, exponentials, the running sum and the accumulator in float32 (tensor cores cut where
//          others round: the unit is taken as 2^-23, twice float32's), the weights P rounded to the input's
//          dtype before P V where that is 16 bits wide, o rounded to the output's dtype.
//
// 1. A sum of n products carries a relative error of gamma(n) = (2 sqrt(n) + 4) 2^-23 of the sum of
//    magnitudes. The worst case is n; roundings are independent with mean 0, so it grows as sqrt(n) (Higham
//    and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019)
//    with a measured constant below 0.5.
// 2. Score j is off by d_j <= gamma(head_dim) scale |q||k_j| + 2^-22 (|s_j| + |max s|): the dot product
//    (Cauchy-Schwarz), then the fold of scale and log2(e), the subtraction of the running maximum and its
//    rescalings.
// 3. exp has relative error x: 2^-21 for float32. For 16-bit inputs a cubic is good enough beside the
//    rounding of P: 2^-13.
// 4. So the weight of key j has a relative error of e_j <= exp(d_j + x) - 1 + gamma(n), the last from the
//    sums over n keys, and with w = sum_j p_j e_j
//        |lse error| <= ln(1 + w) + 2^-22 (|lse| + 1)
//        |o_c error| <= (sum_j p_j e_j |v_jc| + w |o_c|) / (1 - w)          before any rounding to 16 bits.
//    This is a worst case over the signs of these errors: all of them are small. (ln sum exp is convex:
//    weights that are too small by such factors change lse by less than weights that are too large.)
// 5. Rounding P to 16 bits is not small: unit r = 2^-8 (bf16) or 2^-11 (fp16, and f = 2^-25 of the row's
//    largest weight at least, where fp16 runs out of exponent). These roundings are independent, of mean 0
//    and of at most r p_j, so sum_j (rounding_j v_jc) stays below 4 sqrt(sum_j (r p_j v_jc)^2): ten
//    standard deviations of roundings spread evenly. Where many keys have the same score their roundings
//    are the same as well; such data ask for the worst case sum_j r p_j |v_jc|
//    (BoundOptions::repeated_scores). In the other dtypes float32 runs out of exponent at f = 2^-126 of the
//    largest.
// 6. Rounding o: r |o_c|, or half of the smallest subnormal.
// 7. Dropout leaves terms out of the sums over v and multiplies what is left, and its errors, by
//    1 / (1 - p); w is of all weights, as their sum is. Where it drops the large ones, the floors of 5 are
//    what matters.
// 8. Wide rows have w >= 1/4: scores of 1e10 are off by thousands, and from w = 1 on 4 says nothing of o.
//    But whatever its errors, a kernel's weights c_j are the parts of a whole. With D_j = d_j + x
//        c_j <= h_j = min(1, exp(s_j + D_j) / sum_i exp(s_i - D_i)),
//    and since sum_j c_j = 1, the error of o_c is sum_j c_j (v_jc - o_c). Keys with h_j >= 1 / n are the
//    contenders. The error is at most
//        B_c = max over contenders |v_jc - o_c| + sum over the others h_j |v_jc - o_c|:
//    about 0 where one key leads by more than the errors, and never more than the largest and the mean of
//    all |v_jc - o_c| together. The sums add 2 gamma(n). Rounding P adds r c_j, or a floor of min(h_j, f).
//    With F = sum_j min(h_j, f), and with h_j + min(h_j, f) for h_j in the sum over the others,
//        |o_c error| <= B_c + (2 gamma(n) + r + F) (B_c + |o_c|)            before o is rounded,
//    or what 4 and 5 give, if that is smaller. For lse, ln(1 + w) is at most
//    ln sum_j exp(s_j + D_j) - lse + gamma(n), which is finite where w is not. Dropped keys count as keys
//    with v = 0.
//
// Two things are no errors of sums:
//
// 9. Range. Where max(1, scale log2(e)) |q||k_j| exceeds FLT_MAX for a key of the row, float32 may not hold
//    the scores or what they are made of. There NaN is no wrong result of that row, any other number beyond
//    the bound is; where that holds for all its keys and no score is above 0, all may be -infinity (10),
//    which leaves an empty row. GPU kernels say NaN already where the row's maximum, times log2(e), is beyond
//    2^26 (BoundOptions::largest_score). A result too large for its dtype is infinite.
// 10. NaN and infinity in the inputs. A score of NaN or +infinity makes the row's o and lse NaN. A score of
//     -infinity is a weight of 0. Where the row keeps a key whose v_jc is NaN or infinite, o_c is NaN or
//     infinite, as IEEE 754 has it for the sum, and the bound is 0, if each of these keys has a weight that
//     cannot vanish: p_j (1 - e_j) > 2 f max p_i. If one may vanish, or is dropped, or has a score of
//     -infinity, then 0 times infinity and nothing at all are both in order, and the bound is NaN.
//
// Tight: a scale that is wrong by 1%, or a single key too few or too many in a row of a thousand, exceeds
// it (tests/support/verify_test.cpp), and so does one step of the output's dtype (bound_test.cpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "codegen/spec.hpp"
#include "codegen/target.hpp"

namespace flashjit::verify {

struct BoundOptions {
  bool repeated_scores = false;  // rows hold many equal scores, see 5
  double largest_score =
      HUGE_VAL;  // times log2(e); NaN is no wrong result of rows whose maximum is beyond, see 9
};

// See 9.
inline double largest_score(const Target& target) {
  return target.is_cuda() ? 0x1p26 : HUGE_VAL;
}

struct Arithmetic {
  double exp_error;     // relative, see 3
  double weight_unit;   // rounding of P, relative; 0: float32
  double weight_floor;  // the same, absolute, in units of the row's largest weight: f
  double output_unit;   // rounding of o, relative
  double output_floor;  // the same, absolute
};

// Of kernels whose q, k, v and o have that dtype.
inline Arithmetic arithmetic_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {0x1p-13, 0x1p-8, 0x1p-126, 0x1p-8, 0x1p-134};
    case DType::fp16:
      return {0x1p-13, 0x1p-11, 0x1p-25, 0x1p-11, 0x1p-25};
    default:
      return {0x1p-21, 0, 0x1p-126, 0x1p-24, 0x1p-149};
  }
}

// See 1.
inline double gamma(std::int64_t terms) {
  return (2 * std::sqrt(static_cast<double>(terms)) + 4) * 0x1p-23;
}

// See 2.
inline double score_error(int head_dim, double scaled_norms, double score, double max_score) {
  return gamma(head_dim) * scaled_norms + 0x1p-22 * (std::abs(score) + std::abs(max_score));
}

// See 4; `growth` is ln(1 + w).
inline double lse_bound(double lse, double growth) {
  return growth + 0x1p-22 * (std::abs(lse) + 1);
}

// See 6.
inline double with_rounding(const Arithmetic& a, double o, double error) {
  return error + a.output_unit * (std::abs(o) + error) + a.output_floor;
}

// See 4 to 6: o, sum_j p_j e_j |v_j|, w, and the bound on what the roundings of P add.
inline double output_bound(const Arithmetic& a, double o, double magnitude_error, double weights_error,
                           double rounding_of_weights) {
  if (!(weights_error < 1)) return HUGE_VAL;
  return with_rounding(
      a, o, (magnitude_error + weights_error * std::abs(o)) / (1 - weights_error) + rounding_of_weights);
}

// The w of a wide row, see 8. Below it 4 is hardly ever the larger bound.
constexpr double wide_weights_error = 0.25;

// See 8: o, B, n and F.
inline double wide_output_bound(const Arithmetic& a, double o, double spread, std::int64_t keys,
                                double floors) {
  return with_rounding(a, o, spread + (2 * gamma(keys) + a.weight_unit + floors) * (spread + std::abs(o)));
}

// See 9.
inline bool may_overflow(double scale, double norms) {
  return std::max(1.0, scale * std::numbers::log2e) * norms > std::numeric_limits<float>::max();
}

}  // namespace flashjit::verify
