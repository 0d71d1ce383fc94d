#include "tools/verify/row_softmax.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "tools/verify/error_bound.hpp"
#include "tools/verify/forward_bound.hpp"

namespace flashjit::verify {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

double log_sum_of(std::span<const double> x) {
  return log_sum_exp(static_cast<int>(x.size()), [&](int i) { return x[static_cast<std::size_t>(i)]; });
}

}  // namespace

LogSum::LogSum(std::span<const double> x) : all_(log_sum_of(x)) {
  top_ = static_cast<std::size_t>(std::max_element(x.begin(), x.end()) - x.begin());
  std::vector<double> others(x.begin(), x.end());
  others[top_] = -infinity;
  without_top_ = log_sum_of(others);
}

double LogSum::without(std::size_t index, double x) const {
  if (index == top_) return without_top_;
  return x == -infinity ? all_ : all_ + std::log1p(-std::exp(x - all_));  // at most half of the sum
}

double Weight::error() const {
  return std::max(most - value, value - least);
}

RowSoftmax::RowSoftmax(std::span<const double> scores, std::span<const double> errors, double lse,
                       double exp_error, double largest_score)
    : lse_(lse), exp_error_(exp_error) {
  std::int64_t keys = 0;
  max_ = -infinity;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (!(scores[i] < infinity)) max_ = std::numeric_limits<double>::quiet_NaN();
    if (std::isnan(max_)) break;
    max_ = std::max(max_, scores[i]);
    keys += scores[i] > -infinity;
    unknown_ |= errors[i] == infinity && scores[i] > -infinity;
  }
  // The limit is a little lower, because the kernel's own maximum is rounded.
  unknown_ |= std::abs(max_) * std::numbers::log2e > largest_score * (1 - 0x1p-20) && std::isfinite(max_);
  finds_sum_ = std::abs(lse) > largest_exact_lse;
  if (std::isnan(lse) || !std::isfinite(max_)) {
    log_sum_ = std::isnan(lse) ? lse : max_;
    return;
  }
  std::vector<double> low(scores.begin(), scores.end());
  for (double& score : low) score -= max_;
  std::vector<double> high = low;
  log_sum_ = log_sum_of(low);
  if (unknown_) return;
  sum_error_ = gamma(keys);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double error = scores[i] == -infinity ? 0 : error_of(scores[i], errors[i]);
    low[i] -= error;
    high[i] += error;
  }
  least_ = LogSum(low), most_ = LogSum(high);
  has_more_keys_ =
      lse < infinity && lse_error() > lse_bound(max_ + log_sum_, log_sum_of(high) - log_sum_) + 1e-6;
}

// See backward_oracle.hpp, 1: D.
double RowSoftmax::error_of(double score, double error) const {
  return error + shift_error(score - max_, log_sum_) + 0x1p-22 + exp_error_ + sum_error_;
}

double RowSoftmax::lse_error() const {
  return lse_ - max_ - log_sum_;
}

Weight RowSoftmax::weight(std::size_t index, double score, double error) const {
  const double relative = score - max_, exact = std::exp(relative - log_sum_);
  if (score == -infinity) return {std::isnan(max_) ? max_ : 0, 0, 0};
  if (error == infinity || (unknown_ && finds_sum_)) return {exact, 0, infinity};
  if (finds_sum_ && !has_more_keys_) {
    const double d = error_of(score, error), low = relative - d, high = relative + d;
    return {exact, 1 / (1 + std::exp(most_.without(index, high) - low)),
            1 / (1 + std::exp(least_.without(index, low) - high))};
  }
  const double value = has_more_keys_ ? std::exp(score - lse_) : exact;
  const double d = error + 0x1p-22 * (std::abs(score) + std::abs(lse_) + 1) + exp_error_ +
                   (has_more_keys_ ? 0 : std::abs(lse_error()));
  const double most = value * std::exp(d);
  return {value, value * std::exp(-d), finds_sum_ ? std::min(most, 1.0) : most};
}

}  // namespace flashjit::verify
