#include "tools/verify/forward_oracle.hpp"

#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/dropout.hpp"
#include "tools/verify/ds_mla.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/formula.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/rows.hpp"

namespace flashjit::verify {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// How many rows of a head share the conversion of K and V, and how many keys are converted at a time.
constexpr int group_rows = 8;
constexpr int block_keys = 64;

using Vec = double __attribute__((vector_size(16)));
constexpr int lanes = 2;
constexpr int column_step = 4;  // columns of V that are in registers at a time

Vec load(const double* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

void store(double* to, const Vec& v) {
  std::memcpy(to, &v, sizeof v);
}

Vec absolute(const Vec& v) {
  using Bits = std::int64_t __attribute__((vector_size(16)));
  return reinterpret_cast<Vec>(reinterpret_cast<Bits>(v) & std::numeric_limits<std::int64_t>::max());
}

double resolved_scale(const AttentionArgs& args, int head_dim) {
  return args.softmax_scale ? static_cast<double>(*args.softmax_scale)
                            : 1 / std::sqrt(static_cast<double>(head_dim));
}

// The oracle of one launch.
struct Forward {
  AttentionSpec spec;
  AttentionArgs args;
  OracleOptions options;
  Layout layout;
};

// Computes rows; each thread has one, with its own buffers.
class Worker {
 public:
  Worker(const Forward& forward, const Visit& visit)
      : spec_(forward.spec),
        args_(forward.args),
        layout_(forward.layout),
        scale_(resolved_scale(args_, layout_.head_dim)),
        options_(forward.options),
        visit_(visit),
        scales_values_(spec_.kv_scale == KvScale::token_head || is_ds_mla()),
        rounds_values_(scales_values_ && (!decodes() || forward.options.rounds_keys)),
        arithmetic_(arithmetic_of(spec_.dtype, spec_.kv_dtype && !rounds_values_, rounds_values_)),
        rounding_of_o_(rounding_of(args_.o ? args_.o->dtype : spec_.dtype)),
        dropout_(dropout_of(spec_, args_)),
        sees_(spec_, args_),
        formulas_(spec_, args_),
        output_scale_(dropout_scale(dropout_.p)),
        scale_roundings_(spec_.kv_dtype ? 1 : 0),
        terms_(layout_.head_dim + 2 * scale_roundings_) {
    columns_ = (layout_.head_dim_v + column_step - 1) / column_step * column_step;
    q_.resize(static_cast<std::size_t>(group_rows) * layout_.head_dim);
    k_.resize(static_cast<std::size_t>(layout_.head_dim) * block_keys);
    v_.resize(static_cast<std::size_t>(block_keys) * columns_);
    sums_.resize(static_cast<std::size_t>(group_rows) * 3 * columns_);
    bounds_.resize(columns_);
  }

  void run(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    keys_ = (s.seqlen_k + block_keys - 1) / block_keys * block_keys;
    reach_.clear();
    for (auto* array : {&score_, &score_error_, &key_rounding_, &weight_, &error_, &rounding_})
      array->assign(task.rows.size() * keys_, 0.0);
    norm_.assign(keys_, 0.0);
    compute_kept(task);
    compute_value_scales(task);
    compute_scores(task);
    if (formulas_.has_scores()) compute_formulas(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r)
      compute_weights(r, s, task.rows[r] < s.seqlen_q ? sink_of(task.head) : -infinity);
    if (spec_.dropout) drop_weights(task);
    compute_outputs(task);
    if (!reach_.empty()) compute_spread(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r) report(task, r);
  }

 private:
  // Whether a row keeps a key, drops it, or does not see it.
  enum Kept : char { unseen, kept, dropped };

  // f, times the row's largest weight or, of products with scales, divided by the key's scale. See 14 of
  // forward_bound.hpp.
  struct Floors {
    double of_weights = 0, of_products = 0;
  };

  struct RowState {
    double norm = 0, max = -infinity, lse = -infinity;
    double largest = 0;  // largest weight
    double weights_error = 0, growth = 0;
    Floors floors, reach_floors;  // the latter of wide rows, whose sum is sum_of_floors
    double sum_of_floors = 0;
    int keys = 0;            // keys whose scores are above -infinity
    bool no_number = false;  // a score is NaN or infinite
    int vanishing = 0;       // keys whose scores may be -infinity in float32
    bool may_be_nan = false;
    bool wide = false;  // reach_ has the row
    // The sink as a key whose v is 0: its score, weight, and h of wide rows.
    double sink = -infinity, sink_weight = 0, sink_reach = 0;
    bool unknown = false;  // a formula's result cannot be told
  };

  void compute_kept(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    kept_.assign(task.rows.size() * keys_, 0);
    block_kept_.assign(keys_ / block_keys, 0);
    key_kept_.assign(keys_, 0);
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      rows_[r] = {};
      seen_.resize(static_cast<std::size_t>(s.seqlen_k));
      sees_.row(s, task.head, task.rows[r], 0, seen_);
      for (int key = 0; key < s.seqlen_k; ++key) {
        if (!seen_[static_cast<std::size_t>(key)]) continue;
        if (options_.keep && !options_.keep(s.batch, task.head, task.rows[r], key)) continue;
        kept_[r * keys_ + key] = kept;
        block_kept_[key / block_keys] = key_kept_[key] = 1;
      }
    }
  }

  bool decodes() const { return info_of(spec_.op).few_rows; }

  // Whether weights are rounded after the product with their values' scales.
  bool rounds_products() const { return scales_values_ && !rounds_values_; }

  void compute_value_scales(const RowTask& task) {
    if (!rounds_products()) return;
    value_scale_.assign(keys_, 0.0);
    const Sequence& s = layout_.sequences[task.sequence];
    for (int key = 0; key < s.seqlen_k; ++key)
      if (key_kept_[key]) value_scale_[key] = std::abs(kv_scale(value_scales(), s, key, task.head));
    if (!is_ds_mla()) return;
    // The floors of all groups of columns: weights times the largest scale, divided by the least.
    largest_scale_.assign(keys_, 0.0);
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!key_kept_[key]) continue;
      const auto at = layout_.key_index(layout_.k, s, key, task.head);
      value_scale_[key] = infinity;
      for (int group = 0; group < device::DsMla::groups; ++group) {
        const double scale = std::abs(ds_mla_scale(layout_.k, at, group));
        largest_scale_[key] = std::max(largest_scale_[key], scale);
        value_scale_[key] = std::min(value_scale_[key], scale);
      }
    }
  }

  // most(key): what the key's weight can be.
  Floors floors_of(int keys, double largest, const auto& most) const {
    if (!rounds_products()) return {arithmetic_.weight_floor * largest, 0};
    double product = 0;
    const std::vector<double>& scale = is_ds_mla() ? largest_scale_ : value_scale_;
    for (int key = 0; key < keys; ++key)
      if (std::isfinite(scale[key])) product = std::max(product, most(key) * scale[key]);
    return {least_normal * largest, product_floor * product};
  }
  double floor_of(const Floors& floors, int key) const {
    return floors.of_weights + (floors.of_products > 0 ? floors.of_products / value_scale_[key] : 0);
  }

  void compute_scores(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    const int dim = layout_.head_dim;
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      const auto at = layout_.index(layout_.q, s.batch, s.q_begin + task.rows[r], task.head);
      double squares = 0;
      for (int d = 0; d < dim; ++d) {
        const double value = load_element(layout_.q.data, layout_.q.dtype, at + d);
        q_[r * dim + d] = value;
        squares += value * value;
      }
      rows_[r].norm = std::sqrt(squares);
    }
    for (int begin = 0; begin < s.seqlen_k; begin += block_keys) {
      if (!block_kept_[begin / block_keys]) continue;
      const int count = std::min(block_keys, s.seqlen_k - begin);
      std::fill(k_.begin(), k_.end(), 0.0);
      for (int j = 0; j < count; ++j) {
        if (!key_kept_[begin + j]) continue;  // may lie in no page
        const auto at = layout_.key_index(layout_.k, s, begin + j, task.head);
        const double scale = kv_scale(args_.k_scale, s, begin + j, task.head);
        double squares = 0;
        for (int d = 0; d < dim; ++d) {
          const double value = scale * stored(layout_.k, at, d);
          k_[static_cast<std::size_t>(d) * block_keys + j] = value;
          squares += value * value;
        }
        norm_[begin + j] = std::sqrt(squares);
      }
      for (std::size_t r = 0; r < task.rows.size(); ++r) {
        constexpr int width = 8;  // vectors that are in registers at a time
        for (int j = 0; j < block_keys; j += width * lanes) {
          Vec sums[width] = {};
          for (int d = 0; d < dim; ++d) {
            const double* row = &k_[static_cast<std::size_t>(d) * block_keys + j];
            for (int i = 0; i < width; ++i) sums[i] += q_[r * dim + d] * load(row + i * lanes);
          }
          for (int i = 0; i < width; ++i) store(&score_[r * keys_ + begin + j + i * lanes], scale_ * sums[i]);
        }
        for (int j = 0; options_.rounds_keys && j < count; ++j)
          key_rounding_[r * keys_ + begin + j] =
              key_rounding(scale_, &q_[r * dim], &k_[j], block_keys, device::DsMla::columns);
      }
    }
  }

  bool is_ds_mla() const { return spec_.kv_dtype == DType::fp8_ds_mla; }
  // A column of the key or value whose elements begin at `index`, without the scale of kv_scale().
  double stored(const Tensor& cache, std::int64_t index, int column) const {
    return is_ds_mla() ? ds_mla_value(cache, index, column)
                       : load_element(cache.data, cache.dtype, index + column);
  }
  const std::optional<Tensor>& value_scales() const { return spec_.v_in_k ? args_.k_scale : args_.v_scale; }
  // The factor of a key's stored values.
  double kv_scale(const std::optional<Tensor>& scales, const Sequence& s, int key, int head) const {
    if (!spec_.has_kv_scales()) return 1;
    if (!scales) refuse("k_scale or v_scale is missing");
    std::int64_t at = 0;
    if (spec_.kv_scale == KvScale::head) at = layout_.head_kv(head) * scales->strides[0];
    if (spec_.kv_scale == KvScale::token_head) at = layout_.key_index(*scales, s, key, head);
    return static_cast<const float*>(scales->data)[at];
  }

  void compute_formulas(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    const auto keys = static_cast<std::size_t>(s.seqlen_k);
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      const std::size_t base = r * keys_;
      // Nothing was computed for a key that is not kept.
      for (std::size_t key = 0; key < keys; ++key)
        score_error_[base + key] =
            raw_score_error(terms_, scale_ * rows_[r].norm * norm_[key], score_[base + key]) +
            key_rounding_[base + key];
      formulas_.score(s, task.head, task.rows[r], 0, {score_.data() + base, keys},
                      {score_error_.data() + base, keys});
      for (std::size_t key = 0; key < keys; ++key)
        rows_[r].unknown |= kept_[base + key] && score_error_[base + key] == infinity;
    }
  }

  // -infinity: none.
  double sink_of(int head) const {
    if (!spec_.sink_logits) return -infinity;
    if (!args_.sink_logits) refuse("sink_logits is missing");
    return static_cast<const float*>(args_.sink_logits->data)[head * args_.sink_logits->strides[0]];
  }

  // weight_ = p, error_ = p e, rounding_ = the error that rounding P can add, reach_ = h of wide rows: see
  // forward_bound.hpp.
  void compute_weights(std::size_t r, const Sequence& s, double sink) {
    RowState& row = rows_[r];
    row.max = row.lse = row.sink = sink;
    if (!(sink < infinity)) row.no_number = true;
    const std::size_t base = r * keys_;
    const auto weighs = [&](int key) { return kept_[base + key] && score_[base + key] > -infinity; };
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!kept_[base + key]) continue;
      const double score = score_[base + key];
      if (!(score < infinity)) row.no_number = true;
      if (!weighs(key)) continue;
      row.max = std::max(row.max, score);
      const bool overflows = may_overflow(scale_, row.norm * norm_[key]);
      row.may_be_nan |= overflows;
      row.vanishing += overflows && score < 0;
      ++row.keys;
    }
    if (row.no_number || row.keys == 0) return;
    // The limit is a little lower, because the kernel's own maximum is rounded.
    const double largest = options_.largest_score * (1 - 0x1p-20);
    row.may_be_nan |= std::abs(row.max) * std::numbers::log2e > largest;
    double sum = row.sink > -infinity ? std::exp(row.sink - row.max) : 0;
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      weight_[base + key] = std::exp(score_[base + key] - row.max);
      sum += weight_[base + key];
    }
    row.lse = row.max + std::log(sum);
    row.largest = 1 / sum;
    const double of_sums = gamma(row.keys + scale_roundings_);
    if (row.sink > -infinity) {
      row.sink_weight = std::exp(row.sink - row.max) / sum;
      row.weights_error += row.sink_weight * (std::expm1(sink_error(row)) + of_sums);
    }
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      const double weight = weight_[base + key] /= sum;
      const double error = weight * (std::expm1(exponent_error(r, key)) + of_sums);
      error_[base + key] = error;
      row.weights_error += error;
    }
    row.floors =
        floors_of(s.seqlen_k, row.largest, [&](int key) { return weight_[base + key] + error_[base + key]; });
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      const double weight = weight_[base + key];
      const double rounding =
          std::max(arithmetic_.weight_unit * weight, std::min(weight, floor_of(row.floors, key)));
      rounding_[base + key] = options_.repeated_scores ? rounding : rounding * rounding;
    }
    row.growth = std::log1p(row.weights_error);
    row.wide = !(row.weights_error < wide_weights_error);  // true also for NaN, from 0 times infinity
    if (row.wide) compute_reach(r, s, weighs);
  }

  // D.
  double exponent_error(std::size_t r, int key) const {
    const RowState& row = rows_[r];
    if (formulas_.has_scores())
      return score_error_[r * keys_ + key] + shift_error(score_[r * keys_ + key], row.max) +
             arithmetic_.exp_error;
    return score_error(terms_, scale_ * row.norm * norm_[key], score_[r * keys_ + key], row.max) +
           key_rounding_[r * keys_ + key] + arithmetic_.exp_error;
  }

  double sink_error(const RowState& row) const {
    return shift_error(row.sink, row.max) + arithmetic_.exp_error;
  }

  void compute_reach(std::size_t r, const Sequence& s, const auto& weighs) {
    RowState& row = rows_[r];
    const std::size_t base = r * keys_;
    // ln sum exp(s + sign D), relative to the largest score.
    const auto log_sum = [&](double sign) {
      return log_sum_exp(s.seqlen_k + 1, [&](int key) {
        if (key == s.seqlen_k)
          return row.sink - row.max + (row.sink > -infinity ? sign * sink_error(row) : 0);
        return weighs(key) ? score_[base + key] - row.max + sign * exponent_error(r, key) : -infinity;
      });
    };
    const double least = log_sum(-1);
    row.growth = log_sum(1) + std::log(row.largest) + gamma(row.keys + scale_roundings_);
    if (reach_.empty()) reach_.assign(group_rows * keys_, 0.0);
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      const double most = score_[base + key] - row.max + exponent_error(r, key) - least;
      reach_[base + key] = std::exp(std::min(most, 0.0));
    }
    row.reach_floors = floors_of(s.seqlen_k, 1, [&](int key) { return reach_[base + key]; });
    for (int key = 0; key < s.seqlen_k; ++key)
      if (weighs(key)) row.sum_of_floors += std::min(reach_[base + key], floor_of(row.reach_floors, key));
    if (row.sink > -infinity)
      row.sink_reach = std::exp(std::min(row.sink - row.max + sink_error(row) - least, 0.0));
  }

  // Dropout does not change the sums and their errors: they are over all weights.
  void drop_weights(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(s.seqlen_k));
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      dropout_row(dropout_, s.batch, task.head, task.rows[r] + s.row_offset, keep, s.key_offset);
      for (std::size_t key = 0; key < keep.size(); ++key) {
        const std::size_t at = r * keys_ + key;
        if (keep[key] || !kept_[at]) continue;
        kept_[at] = dropped;
        weight_[at] = error_[at] = rounding_[at] = 0;
      }
    }
  }

  // V of the block's keys; the last block may have fewer keys.
  int load_values(const RowTask& task, int begin) {
    const Sequence& s = layout_.sequences[task.sequence];
    const int count = std::min(block_keys, s.seqlen_k - begin);
    for (int j = 0; j < count; ++j) {
      if (!key_kept_[begin + j]) continue;
      const auto at = layout_.key_index(layout_.v, s, begin + j, task.head);
      const double scale = kv_scale(value_scales(), s, begin + j, task.head);
      for (int c = 0; c < layout_.head_dim_v; ++c) {
        v_[static_cast<std::size_t>(j) * columns_ + c] = scale * stored(layout_.v, at, c);
      }
    }
    return count;
  }

  void compute_outputs(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    constexpr int width = column_step / lanes;
    std::fill(sums_.begin(), sums_.end(), 0.0);
    for (int begin = 0; begin < s.seqlen_k; begin += block_keys) {
      if (!block_kept_[begin / block_keys]) continue;
      const int count = load_values(task, begin);
      for (std::size_t r = 0; r < task.rows.size(); ++r) {
        const std::size_t base = r * keys_ + begin;
        double* sums = &sums_[r * 3 * columns_];
        for (std::size_t c = 0; c < columns_; c += width * lanes) {
          Vec o[width], magnitude[width], rounding[width];
          for (int i = 0; i < width; ++i) {
            o[i] = load(sums + c + i * lanes);
            magnitude[i] = load(sums + columns_ + c + i * lanes);
            rounding[i] = load(sums + 2 * columns_ + c + i * lanes);
          }
          for (int j = 0; j < count; ++j) {
            if (!kept_[base + j]) continue;  // an unseen key may hold NaN
            const double weight = weight_[base + j], error = error_[base + j], round = rounding_[base + j];
            for (int i = 0; i < width; ++i) {
              const Vec value = load(&v_[static_cast<std::size_t>(j) * columns_ + c + i * lanes]);
              const Vec size = absolute(value);
              o[i] += weight * value;
              magnitude[i] += error * size;
              rounding[i] += round * (options_.repeated_scores ? size : value * value);
            }
          }
          for (int i = 0; i < width; ++i) {
            store(sums + c + i * lanes, o[i]);
            store(sums + columns_ + c + i * lanes, magnitude[i]);
            store(sums + 2 * columns_ + c + i * lanes, rounding[i]);
          }
        }
      }
    }
  }

  // The two parts of B.
  void compute_spread(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    spread_.assign(task.rows.size() * 2 * columns_, 0.0);
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      const double reach = rows_[r].sink_reach;
      const bool contends = reach * rows_[r].keys >= 1;
      for (int c = 0; c < layout_.head_dim_v && reach > 0; ++c)
        spread_[r * 2 * columns_ + (contends ? 0 : columns_) + c] =
            (contends ? 1 : reach) * std::abs(sums_[r * 3 * columns_ + c]);
    }
    for (int begin = 0; begin < s.seqlen_k; begin += block_keys) {
      if (!block_kept_[begin / block_keys]) continue;
      const int count = load_values(task, begin);
      for (std::size_t r = 0; r < task.rows.size(); ++r) {
        if (!rows_[r].wide) continue;
        const double* o = &sums_[r * 3 * columns_];
        double *of_contenders = &spread_[r * 2 * columns_], *of_others = of_contenders + columns_;
        for (int j = 0; j < count; ++j) {
          const std::size_t at = r * keys_ + begin + j;
          const double reach = reach_[at];
          if (reach == 0) continue;
          const bool contends = reach * rows_[r].keys >= 1;
          const double reach_and_floor = reach + std::min(reach, floor_of(rows_[r].reach_floors, begin + j));
          for (int c = 0; c < layout_.head_dim_v; ++c) {
            const double value = kept_[at] == dropped ? 0 : v_[static_cast<std::size_t>(j) * columns_ + c];
            const double away = std::abs(value - o[c]);
            if (contends) {
              of_contenders[c] = std::max(of_contenders[c], away);
            } else {
              of_others[c] += reach_and_floor * away;
            }
          }
        }
      }
    }
  }

  // Whether every key of the row with NaN or infinity in this column of V has a weight that cannot vanish.
  bool surely_no_number(const RowTask& task, std::size_t r, std::size_t column) const {
    const Sequence& s = layout_.sequences[task.sequence];
    for (int key = 0; key < s.seqlen_k; ++key) {
      const std::size_t at = r * keys_ + key;
      if (!kept_[at]) continue;
      const auto value_at = layout_.key_index(layout_.v, s, key, task.head);
      if (std::isfinite(stored(layout_.v, value_at, static_cast<int>(column)))) continue;
      if (!(weight_[at] - error_[at] > 2 * floor_of(rows_[r].floors, key))) return false;
    }
    return true;
  }

  double bound_of(const RowTask& task, std::size_t r, std::size_t column) const {
    const RowState& state = rows_[r];
    const double* sums = &sums_[r * 3 * columns_];
    const double o = output_scale_ * sums[column];
    if (state.unknown) return std::numeric_limits<double>::quiet_NaN();
    if (!std::isfinite(o))
      return surely_no_number(task, r, column) ? 0 : std::numeric_limits<double>::quiet_NaN();
    if (state.keys == 0) return 0;
    const double squares = sums[2 * columns_ + column];
    const double rounding = options_.repeated_scores ? squares : 4 * std::sqrt(squares);
    double error = mean_error(o, output_scale_ * sums[columns_ + column], state.weights_error) +
                   output_scale_ * rounding;
    if (state.wide) {
      const double* spread = &spread_[r * 2 * columns_];
      const double scaled = output_scale_ * (spread[column] + spread[columns_ + column]);
      error = std::min(error,
                       wide_mean_error(o, scaled, state.keys, arithmetic_.weight_unit + state.sum_of_floors));
    }
    const double underflow = least_normal * (1 + output_scale_ * state.keys * state.largest);
    return with_rounding(rounding_of_o_, o, error + arithmetic_.value_floor + underflow);
  }

  void report(const RowTask& task, std::size_t r) {
    const RowState& state = rows_[r];
    double* const o = &sums_[r * 3 * columns_];
    const auto dim = static_cast<std::size_t>(layout_.head_dim_v);
    const Sequence& s = layout_.sequences[task.sequence];
    const int row = task.rows[r];
    const bool may_be_empty = state.keys > 0 && state.vanishing == state.keys;
    const double lse = state.no_number ? std::numeric_limits<double>::quiet_NaN() : state.lse;
    if (state.no_number) std::fill_n(o, dim, lse);
    for (std::size_t c = 0; c < dim; ++c) {
      bounds_[c] = state.no_number ? 0 : bound_of(task, r, c);
      o[c] *= output_scale_;
    }
    Expected expected{.place = {s.batch, row, task.head},
                      .index = args_.o ? layout_.index(*args_.o, s.batch, s.q_begin + row, task.head) : 0,
                      .values = {o, dim},
                      .bounds = {bounds_.data(), dim},
                      .may_be_nan = state.may_be_nan};
    if (may_be_empty) expected.may_be = 0;
    visit_(expected);
    if (!spec_.lse) return;
    const double bound = state.unknown                        ? std::numeric_limits<double>::quiet_NaN()
                         : std::isinf(lse) || state.no_number ? 0
                                                              : lse_bound(lse, state.growth);
    expected.output = 1;
    expected.index = args_.lse ? layout_.lse_index(*args_.lse, s.batch, s.q_begin + row, task.head) : 0;
    expected.values = {&lse, 1}, expected.bounds = {&bound, 1};
    if (may_be_empty) expected.may_be = state.sink;
    visit_(expected);
  }

  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  const Layout& layout_;
  const double scale_;
  const OracleOptions& options_;
  const Visit& visit_;
  const bool scales_values_, rounds_values_;
  const Arithmetic arithmetic_;
  const Rounding rounding_of_o_;
  const Dropout dropout_;
  const SeenKeys sees_;
  const Formulas formulas_;
  const double output_scale_;
  const int scale_roundings_, terms_;  // of a score and of a weight; of a score in all
  std::size_t columns_ = 0;            // head_dim_v, padded
  std::size_t keys_ = 0;               // seqlen_k, padded
  RowState rows_[group_rows];
  std::vector<double> q_, k_, v_;  // [row][dim], [dim][key], [key][column]
  std::vector<double> score_, score_error_, key_rounding_, weight_, error_, rounding_;  // [row][key]
  std::vector<double> norm_, value_scale_, largest_scale_;                              // [key]
  std::vector<double> reach_;                       // [row][key]; empty if no row is wide
  std::vector<double> sums_, spread_, bounds_;      // [row][3][column], [row][2][column], [column]
  std::vector<char> kept_, block_kept_, key_kept_;  // the last two: by any row
  std::vector<char> seen_;
};

}  // namespace

Oracle forward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  const Forward forward{spec, args, options, Layout(spec, args)};
  const std::int64_t heads = forward.layout.heads_q, columns = forward.layout.head_dim_v;
  const auto& q = forward.layout.q.shape;
  const std::vector<std::int64_t> shape_o =
      spec.varlen ? std::vector{q[0], heads, columns} : std::vector{q[0], q[1], heads, columns};
  const std::vector<std::int64_t> shape_lse =
      spec.varlen ? std::vector{heads, q[0]} : std::vector{q[0], heads, q[1]};
  Oracle oracle{{{"o", shape_o, args.o, {"batch", "row", "head", "dim"}}}, [forward](const Visit& visit) {
                  std::vector<int> rows_of;
                  for (const Sequence& s : forward.layout.sequences) rows_of.push_back(s.rows);
                  run_tasks(row_tasks(rows_of, forward.layout.heads_q, group_rows, forward.options),
                            forward.options, [&] { return Worker(forward, visit); });
                }};
  if (spec.lse) oracle.outputs.push_back({"lse", shape_lse, args.lse, {"batch", "row", "head"}});
  return oracle;
}

}  // namespace flashjit::verify
