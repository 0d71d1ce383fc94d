#include "tools/verify/merge_oracle.hpp"

#include <algorithm>
#include <limits>
#include <numbers>

#include "tools/verify/element.hpp"
#include "tools/verify/error_bound.hpp"
#include "tools/verify/rows.hpp"

namespace flashjit::verify {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

constexpr double exp_error = 0x1p-21;      // x
constexpr double weight_floor = 0x1p-126;  // f

// The oracle of one launch.
struct Merge {
  MergeParts parts;
  Tensor o;
  std::optional<Tensor> lse;
  OracleOptions options;

  std::int64_t part_lse(int part, int batch, int head, int row) const {
    const auto& s = parts.lse_strides;
    return part * s[0] + batch * s[1] + head * s[2] + row * s[3];
  }
  std::int64_t part_o(int part, int batch, int head, int row) const {
    const auto& s = parts.o_strides;
    return part * s[0] + batch * s[1] + row * s[2] + head * s[3];
  }
};

// Computes rows; each thread has one, with its own buffers.
class Worker {
 public:
  Worker(const Merge& merge, const Visit& visit)
      : merge_(merge),
        visit_(visit),
        n_(merge.parts.parts),
        lse_(static_cast<std::size_t>(n_)),
        weight_(lse_.size()),
        error_(lse_.size()),
        reach_(lse_.size()),
        column_(lse_.size()),
        o_(static_cast<std::size_t>(merge.parts.head_dim_v)),
        bound_(o_.size()) {}

  void run(const RowTask& task) {
    for (const int row : task.rows) {
      if (merge_.parts.lse) {
        compute_weights(task, row);
        compute_outputs(task, row);
      } else {
        compute_sums(task, row);
      }
      report(task, row);
    }
  }

 private:
  bool counts(int part) const { return lse_[part] > -infinity; }

  // D.
  double exponent_error(int part) const {
    return n_ * (exp_error + 0x1p-22 * (std::abs(lse_[part]) + std::abs(merged_lse_) + 1));
  }

  double log_sum(double sign) const {
    return log_sum_exp(
        n_, [&](int part) { return counts(part) ? lse_[part] + sign * exponent_error(part) : -infinity; });
  }

  // p, p e and w; for a wide merge also h.
  void compute_weights(const RowTask& task, int row) {
    no_number_ = may_be_nan_ = false;
    may_be_empty_ = true;
    empty_ = true;
    for (int i = 0; i < n_; ++i) {
      lse_[i] = merge_.parts.lse[merge_.part_lse(i, task.sequence, task.head, row)];
      if (lse_[i] == -infinity) continue;
      empty_ = false;
      if (!(lse_[i] < infinity)) no_number_ = true;
      const bool overflows = std::abs(lse_[i]) * std::numbers::log2e > std::numeric_limits<float>::max();
      may_be_nan_ |= overflows;
      may_be_empty_ &= overflows && lse_[i] < 0;
    }
    merged_lse_ = no_number_ ? nan : log_sum_exp(n_, [&](int i) { return lse_[i]; });
    weights_error_ = 0;
    if (no_number_ || empty_) return;
    for (int i = 0; i < n_; ++i) {
      const double away = lse_[i] - merged_lse_;
      weight_[i] = std::exp(away);
      error_[i] = 0;
      if (!counts(i)) continue;
      error_[i] = std::exp(away + exponent_error(i)) - weight_[i] + gamma(n_) * weight_[i] +
                  std::min(weight_[i], weight_floor);
      weights_error_ += error_[i];
    }
    growth_ = std::log1p(weights_error_);
    wide_ = !(weights_error_ < wide_weights_error);
    if (!wide_) return;
    growth_ = log_sum(1) - merged_lse_ + gamma(n_);
    const double least = log_sum(-1);
    for (int i = 0; i < n_; ++i)
      reach_[i] = counts(i) ? std::exp(std::min(lse_[i] + exponent_error(i) - least, 0.0)) : 0;
  }

  void compute_outputs(const RowTask& task, int row) {
    for (std::size_t c = 0; c < o_.size(); ++c) {
      o_[c] = no_number_ ? nan : 0;
      bound_[c] = 0;
      if (no_number_ || empty_) continue;
      double magnitude = n_ * 0x1p-149;
      bool surely = true;  // every NaN or infinity has a weight that cannot vanish
      for (int i = 0; i < n_; ++i) {
        if (!counts(i)) continue;
        const double value = column_[i] =
            load_element(merge_.parts.o, merge_.parts.o_dtype,
                         merge_.part_o(i, task.sequence, task.head, row) + static_cast<std::int64_t>(c));
        o_[c] += weight_[i] * value;
        magnitude += error_[i] * std::abs(value);
        if (!std::isfinite(value)) surely &= weight_[i] - error_[i] > 2 * weight_floor;
      }
      if (!std::isfinite(o_[c])) {
        bound_[c] = surely ? 0 : nan;
        continue;
      }
      double error = mean_error(o_[c], magnitude, weights_error_);
      if (wide_) error = std::min(error, wide_mean_error(o_[c], spread(o_[c]), n_, 0));
      bound_[c] = with_rounding(rounding_of(merge_.o.dtype), o_[c], error);
    }
  }

  void compute_sums(const RowTask& task, int row) {
    for (std::size_t c = 0; c < o_.size(); ++c) {
      o_[c] = 0;
      double magnitude = 0;
      for (int i = 0; i < n_; ++i) {
        const double value =
            load_element(merge_.parts.o, merge_.parts.o_dtype,
                         merge_.part_o(i, task.sequence, task.head, row) + static_cast<std::int64_t>(c));
        o_[c] += value;
        magnitude += std::abs(value);
      }
      bound_[c] =
          std::isfinite(o_[c]) ? with_rounding(rounding_of(merge_.o.dtype), o_[c], gamma(n_) * magnitude) : 0;
    }
  }

  // The bound B of the column.
  double spread(double o) const {
    double of_contenders = 0, of_others = 0;
    for (int i = 0; i < n_; ++i) {
      if (!counts(i)) continue;
      const double away = std::abs(column_[i] - o);
      if (reach_[i] * n_ >= 1) {
        of_contenders = std::max(of_contenders, away);
      } else {
        of_others += reach_[i] * away;
      }
    }
    return of_contenders + of_others;
  }

  void report(const RowTask& task, int row) {
    const auto& o = merge_.o.strides;
    const bool may_be_empty = may_be_empty_ && !empty_;
    Expected expected{.place = {task.sequence, row, task.head},
                      .index = task.sequence * o[0] + row * o[1] + task.head * o[2],
                      .values = o_,
                      .bounds = bound_,
                      .may_be_nan = may_be_nan_};
    if (may_be_empty) expected.may_be = 0;
    visit_(expected);
    if (!merge_.lse) return;
    const auto& lse = merge_.lse->strides;
    const double bound = no_number_ || empty_ ? 0 : lse_bound(merged_lse_, growth_);
    expected.output = 1;
    expected.index = task.sequence * lse[0] + task.head * lse[1] + row * lse[2];
    expected.values = {&merged_lse_, 1}, expected.bounds = {&bound, 1};
    if (may_be_empty) expected.may_be = -infinity;
    visit_(expected);
  }

  const Merge& merge_;
  const Visit& visit_;
  const int n_;
  // For each part: l, p, p e, h, and the current column of o.
  std::vector<double> lse_, weight_, error_, reach_, column_;
  std::vector<double> o_, bound_;  // for each column
  // The current row.
  double merged_lse_ = 0, weights_error_ = 0, growth_ = 0;
  bool empty_ = false, no_number_ = false, may_be_nan_ = false, may_be_empty_ = false, wide_ = false;
};

}  // namespace

Oracle merge_oracle(const MergeParts& parts, const Tensor& o, const std::optional<Tensor>& lse,
                    const OracleOptions& options) {
  const Merge merge{parts, o, lse, options};
  const std::int64_t batch = parts.batch, seqlen_q = parts.seqlen_q, heads = parts.heads;
  Oracle oracle{{{"o", {batch, seqlen_q, heads, parts.head_dim_v}, o, {"batch", "row", "head", "dim"}}},
                [merge](const Visit& visit) {
                  const std::vector<int> rows_of(static_cast<std::size_t>(merge.parts.batch),
                                                 merge.parts.seqlen_q);
                  constexpr int group_rows = 64;
                  run_tasks(row_tasks(rows_of, merge.parts.heads, group_rows, merge.options), merge.options,
                            [&] { return Worker(merge, visit); });
                }};
  if (lse) oracle.outputs.push_back({"lse", {batch, heads, seqlen_q}, lse, {"batch", "row", "head"}});
  return oracle;
}

Oracle merge_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  const auto required = [](const char* name, const std::optional<Tensor>& given, int rank) {
    if (!given) throw Error(ErrorCode::invalid_argument, std::string(name) + " is missing");
    if (given->rank != rank)
      throw Error(
          ErrorCode::invalid_argument,
          std::string(name) + " has rank " + std::to_string(given->rank) + ", not " + std::to_string(rank));
    return *given;
  };
  // Views packed tensors as one batch entry: inserts a dimension of 1 at `at`.
  const auto unpacked = [&](Tensor t, int at) {
    if (!spec.varlen) return t;
    for (int i = t.rank++; i > at; --i) {
      t.shape[i] = t.shape[i - 1];
      t.strides[i] = t.strides[i - 1];
    }
    t.shape[at] = 1;
    t.strides[at] = 0;
    return t;
  };
  const int rank = spec.varlen ? 3 : 4;
  const Tensor parts_o = unpacked(required("parts_o", args.parts_o, rank + 1), 1);
  const Tensor parts_lse = spec.sum ? Tensor{} : unpacked(required("parts_lse", args.parts_lse, rank), 1);
  const auto strides = [](const Tensor& t) {
    return std::array{t.strides[0], t.strides[1], t.strides[2], t.strides[3]};
  };
  const auto size = [&](int dim) { return static_cast<int>(parts_o.shape[dim]); };
  std::optional<Tensor> lse;
  if (spec.lse) lse = unpacked(required("lse", args.lse, rank - 1), 0);
  return merge_oracle({.parts = size(0),
                       .batch = size(1),
                       .seqlen_q = size(2),
                       .heads = size(3),
                       .head_dim_v = size(4),
                       .o = parts_o.data,
                       .o_dtype = parts_o.dtype,
                       .o_strides = strides(parts_o),
                       .lse = static_cast<const float*>(parts_lse.data),
                       .lse_strides = strides(parts_lse)},
                      unpacked(required("o", args.o, rank), 0), lse, options);
}

}  // namespace flashjit::verify
