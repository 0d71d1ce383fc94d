// The softmax of a backward's row, made anew in float64 from the row's scores, and how far the weights of a
// kernel may be from it: backward_oracle.hpp, 1.
#pragma once

#include <span>

namespace flashjit::verify {

// Beyond it a kernel may not make weights from lse: its rounding alone would cost them 2^-8.
constexpr double largest_exact_lse = 0x1p13;

// ln of a sum of exp(x_i), of all terms or of all but one.
class LogSum {
 public:
  LogSum() = default;
  explicit LogSum(std::span<const double> x);
  // Without the term `index`, which is x.
  double without(std::size_t index, double x) const;

 private:
  std::size_t top_ = 0;
  double all_ = 0, without_top_ = 0;
};

// A weight, and the least and the most that a kernel may compute for it.
struct Weight {
  double value, least, most;
  double error() const;
};

class RowSoftmax {
 public:
  RowSoftmax() = default;
  // scores, errors: of each key, and last of the sink. A key that is not kept has the score -inf and the
  // error 0. With an infinite error nobody can tell the weight, nor the row's others where a kernel finds
  // their sum again. lse: the row's as the backward gets it. exp_error: of a weight's exponential, relative.
  // largest_score: as in OracleOptions.
  RowSoftmax(std::span<const double> scores, std::span<const double> errors, double lse, double exp_error,
             double largest_score);

  // A row whose lse is no larger than largest_exact_lse keeps the lse that is given.
  RowSoftmax(double lse, double exp_error) : max_(lse), lse_(lse), exp_error_(exp_error) {}

  // The weight of term `index` with this score and error.
  Weight weight(std::size_t index, double score, double error) const;

 private:
  double error_of(double score, double error) const;
  double lse_error() const;

  // lse is max_ + log_sum_, apart: float64 cannot hold the sum of a score of 1e38 and a logarithm.
  double max_ = 0, log_sum_ = 0;
  double lse_ = 0, exp_error_ = 0, sum_error_ = 0;
  bool unknown_ = false;
  bool finds_sum_ = false;  // a kernel may have found the row's maximum and sum again
  bool has_more_keys_ = false;
  LogSum least_, most_;
};

}  // namespace flashjit::verify
