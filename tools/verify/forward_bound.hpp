// How far a correct forward's output may be from the exact one, element by element. A to D are those of
// error_bound.hpp.
//
// Exact:   s_j = scale q.k_j,  p_j = exp(s_j) / sum_i exp(s_i),  o_c = sum_j p_j v_jc,
//          lse = ln sum_j exp(s_j), over the n keys j that the row keeps, from the inputs as stored.
// Kernel:  scores, exponentials, the running sum and the accumulator in float32, the weights P rounded to
//          the input's dtype before P V if that has 16 bits, o rounded to the output's dtype.
//
// 1. Sums are those of A.
// 2. Score j is off by d_j <= gamma(head_dim) scale |q||k_j| + 2^-22 (|s_j| + |max s|): the dot product
//    (Cauchy-Schwarz), then the fold of scale and log2(e), the subtraction of the running maximum and its
//    rescalings.
// 3. exp has relative error x: 2^-21 for float32. For 16-bit inputs a cubic is good enough beside the
//    rounding of P: 2^-13.
// 4. So the weight of key j has a relative error of e_j <= exp(d_j + x) - 1 + gamma(n), the last from the
//    sums over n keys, and B gives lse, and o before any rounding to 16 bits.
// 5. Rounding P to 16 bits is not small: unit r = 2^-8 (bf16) or 2^-11 (fp16, and f = 2^-25 of the row's
//    largest weight at least, where fp16 runs out of exponent). These roundings are independent, of mean 0
//    and of at most r p_j, so sum_j (rounding_j v_jc) stays below 4 sqrt(sum_j (r p_j v_jc)^2): ten
//    standard deviations of roundings spread evenly. Keys with the same score have the same rounding;
//    data with many such keys need the worst case sum_j r p_j |v_jc|
//    (OracleOptions::repeated_scores). In the other dtypes float32 runs out of exponent at f = 2^-126 of the
//    largest.
// 6. Rounding o is D.
// 7. Dropout leaves terms out of the sums over v, and multiplies the other terms and their errors by
//    1 / (1 - p). w and the sum of the weights are over all weights. If dropout drops the large weights, the
//    floors of 5 matter most.
// 8. C bounds wide rows, with D_j = d_j + x: scores of 1e10, for example, are off by thousands. Rounding P
//    adds r c_j, or a floor of min(h_j, f). With F = sum_j min(h_j, f), and with h_j + min(h_j, f) for h_j
//    in the sum over the others, the rounding of C's weights is r + F. Dropped keys count as keys with
//    v = 0.
//
// Two cases are no errors of sums:
//
// 9. Range. If max(1, scale log2(e)) |q||k_j| exceeds FLT_MAX for a key of the row, float32 may not hold the
//    scores or their terms. NaN is then no wrong result of that row; any other number beyond the bound is
//    wrong. If this holds for all keys of the row and no score is above 0, all scores may be -infinity (10),
//    and the row may be empty. GPU kernels give NaN if the row's maximum, times log2(e), is beyond 2^26
//    (OracleOptions::largest_score).
// 10. NaN and infinity in the inputs. A score of NaN or +infinity makes the row's o and lse NaN. A score of
//     -infinity is a weight of 0. If the row keeps a key whose v_jc is NaN or infinite, o_c is NaN or
//     infinite, as IEEE 754 has it for the sum, and the bound is 0, if each of these keys has a weight that
//     cannot vanish: p_j (1 - e_j) > 2 f max p_i. If one may vanish, or is dropped, or has a score of
//     -infinity, then both 0 times infinity and no term at all are right, and the bound is NaN.
//
// With formulas and sinks:
//
// 11. Formulas of scores begin with scale q.k, whose error is that of the dot product and of one
//     multiplication, and add their own (formula.hpp). What is left of d_j after them is the fold of log2(e)
//     and the subtraction of the maximum.
// 12. A sink logit is one more key, whose score is exact and whose v is 0.
//
// With a kv_dtype:
//
// 13. The inputs are the stored values times their scales. Products are of stored values. A score is
//     multiplied by its key's scale, and a weight, or the sum, by that of its value: gamma(head_dim + 2) and
//     gamma(n + 1). The other 1 of the former is for GPUs, which make q fp16 times a power of two: that loses
//     less than 2^-34 |q||k_j|.
// 14. GPUs round P to fp16, so f is 2^-25 for bf16, too. A decode with a scale of each value rounds P times
//     that scale. Its units are at most 2^-12 of the row's largest such product, max_i p_i |scale_i|, so the
//     weight of key j has the floor 2^-36 max_i p_i |scale_i| / |scale_j|: twice 2^-25 2^-12, for the errors
//     of the weights themselves. Weights run out of float32's exponent before, at 2^-126 of the largest.
// 15. A forward with a scale of each value rounds P to the dtype, and the value times its scale: its relative
//     error adds to that of P, and fp16 adds 2^-25 where the product is below the least normal number.
//
// 16. Denormal float32 numbers may count as zeros, and do on CPUs. With t = 2^-126 each of the n products of
//     a weight and a value is off by at most t of the largest weight, and o by t.
//
// 17. A GPU rounds the columns of fp8_ds_mla times their scales to bf16 (OracleOptions::rounds_keys): values
//     as in 15, and in scores, where the roundings count as those of 5 do: d_j has
//     4 scale sqrt(sum_c (2^-8 q_c k_jc)^2) more.
//
// Tight: a scale that is wrong by 1%, or a single key too few or too many in a row of a thousand, exceeds
// it (tests/support/verify_test.cpp), and so does one step of the output's dtype (bound_test.cpp).
#pragma once

#include <algorithm>
#include <numbers>

#include "codegen/base/target.hpp"
#include "codegen/spec/spec.hpp"
#include "tools/verify/error_bound.hpp"

namespace flashjit::verify {

// For OracleOptions::largest_score, see 9.
inline double largest_score(const Target& target) {
  return target.is_cuda() ? 0x1p26 : HUGE_VAL;
}

struct Arithmetic {
  double exp_error;     // relative; see 3
  double weight_unit;   // rounding of P, relative; 0: float32
  double weight_floor;  // the same, absolute, in units of the row's largest weight: f
  double value_floor;   // rounding of V, absolute; see 15
};

// The arithmetic of kernels whose q, k and v have that dtype. weights_in_fp16, scales_values: see 14, 15.
inline Arithmetic arithmetic_of(DType dtype, bool weights_in_fp16, bool scales_values) {
  switch (dtype) {
    case DType::bf16:
      return {0x1p-13, 0x1p-8 + (scales_values ? 0x1p-9 : 0), weights_in_fp16 ? 0x1p-25 : 0x1p-126, 0};
    case DType::fp16:
      return {0x1p-13, 0x1p-11 + (scales_values ? 0x1p-12 : 0), 0x1p-25, scales_values ? 0x1p-25 : 0};
    default:
      return {0x1p-21, 0, 0x1p-126, 0};
  }
}

// See 14.
constexpr double product_floor = 0x1p-36;

// See 16.
constexpr double least_normal = 0x1p-126;

// See 2: of the fold of log2(e) and the subtraction of the maximum.
inline double shift_error(double score, double max_score) {
  return 0x1p-22 * (std::abs(score) + std::abs(max_score));
}
inline double score_error(int head_dim, double scaled_norms, double score, double max_score) {
  return gamma(head_dim) * scaled_norms + shift_error(score, max_score);
}
// See 17. k: a column of the key each `step` elements.
inline double key_rounding(double scale, const double* q, const double* k, std::size_t step, int columns) {
  double squares = 0;
  for (int c = 0; c < columns; ++c, k += step) squares += q[c] * q[c] * *k * *k;
  return 4 * 0x1p-8 * std::abs(scale) * std::sqrt(squares);
}
inline bool rounds_keys(const AttentionSpec& spec, const Target& target) {
  return spec.kv_dtype == DType::fp8_ds_mla && target.is_cuda();
}
// See 11.
inline double raw_score_error(int head_dim, double scaled_norms, double score) {
  return gamma(head_dim) * scaled_norms + 0x1p-23 * std::abs(score);
}

// See 9.
inline bool may_overflow(double scale, double norms) {
  return std::max(1.0, scale * std::numbers::log2e) * norms > std::numeric_limits<float>::max();
}

}  // namespace flashjit::verify
