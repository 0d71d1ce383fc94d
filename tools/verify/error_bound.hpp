// The common parts of all operations' error bounds. forward_bound.hpp and merge_oracle.hpp derive from them
// how far a correct kernel's output may be from the exact one.
//
// A. Sums. In float32 (tensor cores cut where others round: the unit is taken as 2^-23, twice float32's) a
//    sum of n products carries a relative error of gamma(n) = (2 sqrt(n) + 4) 2^-23 of the sum of
//    magnitudes. The worst case is n; roundings are independent with mean 0, so it grows as sqrt(n) (Higham
//    and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019)
//    with a measured constant below 0.5.
// B. Weighted means: o_c = sum_j p_j v_jc, where p_j = exp(s_j) / sum_i exp(s_i) and
//    lse = ln sum_j exp(s_j). If weight j has a relative error of e_j, and w = sum_j p_j e_j, then
//        |lse error| <= ln(1 + w) + 2^-22 (|lse| + 1)
//        |o_c error| <= (sum_j p_j e_j |v_jc| + w |o_c|) / (1 - w).
//    This is a worst case over the signs of these errors: all of them are small. (ln sum exp is convex:
//    weights that are too small by such factors change lse by less than weights that are too large.)
// C. Wide means have w >= 1/4, and B gives no bound for o if w >= 1. But a kernel's weights c_j sum to 1,
//    whatever their errors. If s_j is off by at most D_j,
//        c_j <= h_j = min(1, exp(s_j + D_j) / sum_i exp(s_i - D_i)),
//    and since sum_j c_j = 1, the error of o_c is sum_j c_j (v_jc - o_c). Terms with h_j >= 1 / n are the
//    contenders. The error is at most
//        B_c = max over contenders |v_jc - o_c| + sum over the others h_j |v_jc - o_c|:
//    about 0 if one term leads by more than the errors, and never more than the largest and the mean of
//    all |v_jc - o_c| together. The sums add 2 gamma(n), and an operation's rounding of the weights an r:
//        |o_c error| <= B_c + (2 gamma(n) + r) (B_c + |o_c|),
//    or what B gives, if that is smaller. For lse, ln(1 + w) is at most ln sum_j exp(s_j + D_j) - lse
//    + gamma(n), which is finite even if w is not.
// D. Rounding an output depends on the output's dtype, not on the inputs': r |o_c|, or half of the smallest
//    subnormal. A result too large for its dtype is infinite (report.hpp).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "codegen/spec/dtype.hpp"

namespace flashjit::verify {

// See A.
inline double gamma(std::int64_t terms) {
  return (2 * std::sqrt(static_cast<double>(terms)) + 4) * 0x1p-23;
}

// See B; `growth` is ln(1 + w).
inline double lse_bound(double lse, double growth) {
  return growth + 0x1p-22 * (std::abs(lse) + 1);
}

// See B: o, sum_j p_j e_j |v_j|, w.
inline double mean_error(double o, double magnitude_error, double weights_error) {
  if (!(weights_error < 1)) return HUGE_VAL;
  return (magnitude_error + weights_error * std::abs(o)) / (1 - weights_error);
}

// The w of a wide mean, see C. Below it B is hardly ever the larger bound.
constexpr double wide_weights_error = 0.25;

// See C: o, B, n and r.
inline double wide_mean_error(double o, double spread, std::int64_t terms, double weight_rounding) {
  return spread + (2 * gamma(terms) + weight_rounding) * (spread + std::abs(o));
}

// ln sum_j exp(exponent(j)) over j < n.
double log_sum_exp(int n, const auto& exponent) {
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int j = 0; j < n; ++j) top = std::max(top, exponent(j));
  if (std::isinf(top)) return top;
  for (int j = 0; j < n; ++j) sum += std::exp(exponent(j) - top);
  return top + std::log(sum);
}

// How numbers are rounded to a dtype.
struct Rounding {
  double unit;   // relative
  double floor;  // half of the smallest subnormal
};

inline Rounding rounding_of(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {0x1p-8, 0x1p-134};
    case DType::fp16:
      return {0x1p-11, 0x1p-25};
    default:
      return {0x1p-24, 0x1p-149};
  }
}

// See D: o, and its error before it is rounded.
inline double with_rounding(const Rounding& to, double o, double error) {
  return error + to.unit * (std::abs(o) + error) + to.floor;
}

}  // namespace flashjit::verify
