#include "tools/verify/backward_oracle.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "codegen/spec/declarations.hpp"
#include "runtime/dropout.hpp"
#include "tools/verify/dropout.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/error_bound.hpp"
#include "tools/verify/formula.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/row_softmax.hpp"
#include "tools/verify/rows.hpp"

namespace flashjit::verify {
namespace {

constexpr int group_rows = 8;
constexpr double least = 0x1p-126;  // of normal float32

struct Backward {
  AttentionSpec spec;
  AttentionArgs args;
  OracleOptions options;
  Layout layout;
};

double dot(const double* a, const double* b, int n) {
  double sums[4] = {};
  int i = 0;
  for (; i + 4 <= n; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Vectors of a head, converted.
struct Vectors {
  int dim = 0;
  std::vector<double> values, norms;
  const double* operator[](int i) const { return &values[static_cast<std::size_t>(i) * dim]; }
  void resize(int count, int columns) {
    dim = columns;
    values.resize(static_cast<std::size_t>(count) * columns);
    norms.resize(static_cast<std::size_t>(count));
  }
  void load(int i, const Tensor& t, std::int64_t at) {
    double* const to = &values[static_cast<std::size_t>(i) * dim];
    for (int c = 0; c < dim; ++c) to[c] = load_element(t.data, t.dtype, at + c);
    norms[i] = std::sqrt(dot(to, to, dim));
  }
};

// The sums of a gradient's element: see backward_oracle.hpp.
struct Sum {
  double value = 0, error = 0, magnitude = 0, squares = 0, worst = 0;
  void add(double factor, double factor_error, double rounding, double x) {
    value += factor * x;
    error += factor_error * std::abs(x);
    magnitude += std::abs(factor * x);
    squares += rounding * rounding * x * x;
    worst += rounding * std::abs(x);
  }
};

// The contribution of one pair of a row and a key.
struct Pair {
  bool kept = false, weightless = false;
  double w = 0, w_error = 0, w_rounding = 0;
  double g = 0, g_error = 0, g_rounding = 0;
  double final_g = 0, final_error = 0;  // by the final score, after formulas
};

// The softmax of every row: of a sequence's head, one for each row.
using Softmaxes = std::vector<std::vector<RowSoftmax>>;

class Worker {
 public:
  Worker(const Backward& of, Softmaxes& softmaxes, const Visit& visit)
      : spec_(of.spec),
        args_(of.args),
        options_(of.options),
        layout_(of.layout),
        softmaxes_(softmaxes),
        visit_(visit),
        scale_(args_.softmax_scale ? static_cast<double>(*args_.softmax_scale)
                                   : 1 / std::sqrt(static_cast<double>(layout_.head_dim))),
        dropout_(dropout_of(spec_, args_)),
        dropout_scale_(dropout_scale(dropout_.p)),
        rounding_(rounding_of(spec_.dtype)),
        gradient_rounding_(rounding_of(spec_.grad_dtype.value_or(spec_.dtype))),
        sees_(spec_, args_),
        formulas_(spec_, args_) {}

 protected:
  void load_rows(int sequence, int head) {
    if (rows_of_[0] == sequence && rows_of_[1] == head) return;
    rows_of_[0] = sequence, rows_of_[1] = head;
    const Sequence& s = layout_.sequences[sequence];
    q_.resize(s.seqlen_q, layout_.head_dim);
    d_o_.resize(s.seqlen_q, layout_.head_dim_v);
    Vectors o;
    o.resize(1, layout_.head_dim_v);
    lse_.resize(static_cast<std::size_t>(s.seqlen_q));
    delta_ = delta_error_ = lse_;
    gives_nothing_.resize(lse_.size());
    for (int row = 0; row < s.seqlen_q; ++row) {
      const auto place = [&](const Tensor& t) { return layout_.index(t, s.batch, s.q_begin + row, head); };
      const auto number = [&](const Tensor& t) {
        return load_element(t.data, t.dtype, layout_.lse_index(t, s.batch, s.q_begin + row, head));
      };
      q_.load(row, layout_.q, place(layout_.q));
      d_o_.load(row, *args_.d_o, place(*args_.d_o));
      o.load(0, *args_.o, place(*args_.o));
      lse_[row] = number(*args_.lse);
      const double dlse = args_.dlse ? number(*args_.dlse) : 0;
      delta_[row] = dot(d_o_[row], o[0], o.dim) - dlse;
      delta_error_[row] = gamma(o.dim) * d_o_.norms[row] * o.norms[0] +
                          0x1p-22 * (std::abs(delta_[row]) + std::abs(dlse)) +
                          (o.dim + d_o_.norms[row]) * least;
      gives_nothing_[row] = d_o_.norms[row] == 0 && dlse == 0 && std::isfinite(delta_[row]);
    }
    keep_.assign(static_cast<std::size_t>(s.seqlen_k) * (spec_.dropout ? s.seqlen_q : 0), 1);
    for (int row = 0; spec_.dropout && row < s.seqlen_q; ++row)
      dropout_row(
          dropout_, s.batch, head, row + s.row_offset,
          {keep_.data() + static_cast<std::size_t>(row) * s.seqlen_k, static_cast<std::size_t>(s.seqlen_k)},
          s.key_offset);
  }
  void load_keys(int sequence, int head) {
    const int head_kv = layout_.head_kv(head);
    if (keys_of_[0] == sequence && keys_of_[1] == head_kv) return;
    keys_of_[0] = sequence, keys_of_[1] = head_kv;
    const Sequence& s = layout_.sequences[sequence];
    k_.resize(s.seqlen_k, layout_.head_dim);
    v_.resize(s.seqlen_k, layout_.head_dim_v);
    for (int key = 0; key < s.seqlen_k; ++key) {
      k_.load(key, layout_.k, layout_.key_index(layout_.k, s, key, head));
      v_.load(key, layout_.v, layout_.key_index(layout_.v, s, key, head));
    }
  }

  // -infinity: none.
  double sink_of(int head) const {
    if (!spec_.sink_logits) return -std::numeric_limits<double>::infinity();
    const Tensor& logits = need(args_.sink_logits, "sink_logits", 1);
    return load_element(logits.data, logits.dtype, head * logits.strides[0]);
  }

  std::vector<RowSoftmax>& softmaxes_of(int sequence, int head) {
    return softmaxes_[static_cast<std::size_t>(sequence) * layout_.heads_q + head];
  }

  // Which keys the row keeps, of `count` that were loaded, and their scores. Those before formulas have their
  // derivatives if `differentiates`.
  void make_scores(int sequence, int head, int row, int first_key, int count, bool differentiates) {
    const Sequence& s = layout_.sequences[sequence];
    const auto keys = static_cast<std::size_t>(count);
    seen_.resize(keys);
    sees_.row(s, head, row, first_key, seen_);
    scores_.resize(keys);
    score_errors_.resize(keys);
    for (std::size_t i = 0; i < keys; ++i) {
      const int key = first_key + static_cast<int>(i);
      seen_[i] = seen_[i] && (!options_.keep || options_.keep(s.batch, head, row, key));
      scores_[i] = scale_ * dot(q_[row], k_[key], q_.dim);
      const double norms = scale_ * q_.norms[row] * k_.norms[key];
      score_errors_[i] =
          formulas_.has_scores() ? raw_score_error(q_.dim, norms, scores_[i]) : gamma(q_.dim) * norms;
      if (may_overflow(scale_, q_.norms[row] * k_.norms[key])) score_errors_[i] = HUGE_VAL;
    }
    if (!formulas_.has_scores()) return;
    if (differentiates) derivatives_ = formulas_.derivatives(s, head, row, first_key, scores_, score_errors_);
    formulas_.score(s, head, row, first_key, scores_, score_errors_);
  }

  // The pairs of a row and `count` keys, of those that were loaded.
  void make_pairs(int sequence, int head, int row, int first_key, int count) {
    const Sequence& s = layout_.sequences[sequence];
    const auto keys = static_cast<std::size_t>(std::max(count, 0));
    pairs_.assign(keys, {});
    derivatives_ = {};
    if (keys == 0 || lse_[row] == -std::numeric_limits<double>::infinity() || gives_nothing_[row]) return;
    make_scores(sequence, head, row, first_key, count, true);
    const RowSoftmax& softmax = softmaxes_of(sequence, head)[static_cast<std::size_t>(row)];
    for (std::size_t i = 0; i < keys; ++i) {
      const int key = first_key + static_cast<int>(i);
      if (seen_[i])
        pairs_[i] =
            pair(s, row, key, i, softmax.weight(static_cast<std::size_t>(key), scores_[i], score_errors_[i]));
    }
  }

  Pair pair(const Sequence& s, int row, int key, std::size_t at, const Weight& weight) const {
    Pair pair;
    pair.kept = true;
    const double p = weight.value, p_error = weight.error();
    const bool rounds = spec_.dtype != DType::fp32;
    if (formulas_.has_scores() && !std::isnan(p) &&
        (scores_[at] == -std::numeric_limits<double>::infinity() || weight.most < 0x1p-151)) {
      // The weight is 0, whatever the derivatives are.
      pair.weightless = true;
      pair.w_error = pair.g_error = least;
      if (rounds) pair.w_rounding = pair.g_rounding = rounding_.floor;
      return pair;
    }
    const double m = !spec_.dropout ? 1
                     : keep_[static_cast<std::size_t>(row) * s.seqlen_k + static_cast<std::size_t>(key)]
                         ? dropout_scale_
                         : 0;
    const double product = m * dot(d_o_[row], v_[key], v_.dim);
    const double product_error = m * (gamma(v_.dim) * d_o_.norms[row] * v_.norms[key] + v_.dim * least);
    pair.w = m * p;
    pair.w_error = m * (p_error + least);
    pair.g = p * (product - delta_[row]);
    pair.g_error = std::abs(product - delta_[row]) * p_error +
                   (weight.most + least) * (product_error + delta_error_[row]) +
                   (p * 0x1p-22 + least) * (std::abs(product) + std::abs(delta_[row])) + least;
    pair.final_g = pair.g;
    pair.final_error = pair.g_error;
    if (formulas_.has_scores()) {
      const auto [g, error] = times(pair, derivatives_.by_score[at], derivatives_.errors[at]);
      pair.g = g;
      pair.g_error = error;
    }
    if (rounds) {
      pair.w_rounding = m > 0 ? rounding_.unit * pair.w + rounding_.floor : 0;
      pair.g_rounding = rounding_.unit * std::abs(pair.g) + rounding_.floor;
    }
    return pair;
  }
  // The gradient by the final score times a derivative, and its error.
  static std::pair<double, double> times(const Pair& pair, double derivative, double error) {
    if (pair.weightless || (derivative == 0 && error == 0 && std::isfinite(pair.final_g))) return {0, 0};
    const double g = pair.final_g * derivative;
    return {g, std::abs(pair.final_g) * error + pair.final_error * (std::abs(derivative) + error) +
                   0x1p-23 * std::abs(g) + least};
  }

  void report(std::size_t output, const std::optional<Tensor>& actual, const Sequence& s, std::int64_t row,
              std::int64_t index, int head, double factor, std::int64_t terms, const std::vector<Sum>& sums) {
    values_.resize(sums.size());
    bounds_.resize(sums.size());
    for (std::size_t c = 0; c < sums.size(); ++c) {
      const Sum& sum = sums[c];
      const double rounding =
          options_.repeated_scores ? sum.worst : std::min(sum.worst, 4 * std::sqrt(sum.squares));
      const double flushed = least * static_cast<double>(terms);
      const double error =
          factor * (sum.error + gamma(terms) * (sum.magnitude + sum.error) + rounding + flushed) + least;
      values_[c] = factor * sum.value;
      bounds_[c] = terms == 0                  ? 0
                   : std::isfinite(values_[c]) ? with_rounding(gradient_rounding_, values_[c], error)
                                               : std::numeric_limits<double>::quiet_NaN();
    }
    visit_({.output = output,
            .place = {s.batch, row, head},
            .index = actual ? index : 0,
            .values = values_,
            .bounds = bounds_});
  }

  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  const OracleOptions& options_;
  const Layout& layout_;
  Softmaxes& softmaxes_;
  const Visit& visit_;
  const double scale_;
  const Dropout dropout_;
  const double dropout_scale_;
  const Rounding rounding_, gradient_rounding_;
  int rows_of_[2] = {-1, -1}, keys_of_[2] = {-1, -1};
  Vectors q_, d_o_, k_, v_;
  std::vector<double> lse_, delta_, delta_error_, values_, bounds_;
  std::vector<char> gives_nothing_;  // rows whose do and dlse are 0
  std::vector<std::uint8_t> keep_;
  const SeenKeys sees_;
  const Formulas formulas_;
  std::vector<char> seen_;
  std::vector<double> scores_, score_errors_;
  std::vector<Pair> pairs_;
  Formulas::Derivatives derivatives_;
};

// The softmax of rows.
class SoftmaxWorker : Worker {
 public:
  using Worker::Worker;
  void run(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    load_rows(task.sequence, task.head);
    load_keys(task.sequence, task.head);
    for (const int row : task.rows) {
      if (row >= s.seqlen_q) continue;
      RowSoftmax& softmax = softmaxes_of(task.sequence, task.head)[static_cast<std::size_t>(row)];
      const double exp_error = spec_.dtype == DType::fp32 ? 0x1p-21 : 0x1p-13;
      // A sample of keys sees all rows: their softmaxes would take longer than all else.
      if (options_.max_rows > 0 && std::abs(lse_[row]) <= largest_exact_lse) {
        softmax = {lse_[row], exp_error};
        continue;
      }
      make_scores(task.sequence, task.head, row, 0, s.seqlen_k, false);
      for (std::size_t key = 0; key < seen_.size(); ++key)
        if (!seen_[key]) scores_[key] = -std::numeric_limits<double>::infinity(), score_errors_[key] = 0;
      scores_.push_back(sink_of(task.head));
      score_errors_.push_back(0);
      softmax = {scores_, score_errors_, lse_[row], exp_error, options_.largest_score};
    }
  }
};

// Rows of dq.
class RowWorker : Worker {
 public:
  using Worker::Worker;
  void run(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    load_rows(task.sequence, task.head);
    load_keys(task.sequence, task.head);
    for (const int row : task.rows) {
      std::vector<Sum> sums(static_cast<std::size_t>(layout_.head_dim));
      int terms = 0;
      if (row < s.seqlen_q) make_pairs(task.sequence, task.head, row, 0, s.seqlen_k);
      for (int key = 0; row < s.seqlen_q && key < s.seqlen_k; ++key) {
        const Pair& p = pairs_[static_cast<std::size_t>(key)];
        if (!p.kept) continue;
        ++terms;
        for (int c = 0; c < layout_.head_dim; ++c) sums[c].add(p.g, p.g_error, p.g_rounding, k_[key][c]);
      }
      const auto index = args_.dq ? layout_.index(*args_.dq, s.batch, s.q_begin + row, task.head) : 0;
      report(0, args_.dq, s, row, index, task.head, scale_, terms, sums);
    }
  }
};

// Keys of dk and dv; the heads of tasks are key/value heads, their rows are keys.
class KeyWorker : Worker {
 public:
  using Worker::Worker;
  void run(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    const int group = layout_.heads_q / layout_.heads_kv, first = task.head * group;
    const auto dim = static_cast<std::size_t>(layout_.head_dim),
               dim_v = static_cast<std::size_t>(layout_.head_dim_v);
    std::vector<std::vector<Sum>> dk(task.rows.size(), std::vector<Sum>(dim)),
        dv(task.rows.size(), std::vector<Sum>(dim_v));
    std::vector<std::int64_t> terms(task.rows.size());
    load_keys(task.sequence, first);
    for (int head = first; head < first + group; ++head) {
      load_rows(task.sequence, head);
      const auto [least_key, last_key] = std::minmax_element(task.rows.begin(), task.rows.end());
      const int first_key = *least_key;
      for (int row = 0; row < s.seqlen_q; ++row) {
        make_pairs(task.sequence, head, row, first_key, std::min(*last_key + 1, s.seqlen_k) - first_key);
        for (std::size_t i = 0; i < task.rows.size(); ++i) {
          if (task.rows[i] >= s.seqlen_k) continue;
          const Pair& p = pairs_[static_cast<std::size_t>(task.rows[i] - first_key)];
          if (!p.kept) continue;
          ++terms[i];
          for (std::size_t c = 0; c < dim; ++c) dk[i][c].add(p.g, p.g_error, p.g_rounding, q_[row][c]);
          for (std::size_t c = 0; c < dim_v; ++c) dv[i][c].add(p.w, p.w_error, p.w_rounding, d_o_[row][c]);
        }
      }
    }
    for (std::size_t i = 0; i < task.rows.size(); ++i) {
      const int key = task.rows[i];
      const auto index = [&](const std::optional<Tensor>& t) {
        return t ? layout_.key_index(*t, s, key, first) : 0;
      };
      report(1, args_.dk, s, key, index(args_.dk), task.head, scale_, terms[i], dk[i]);
      report(2, args_.dv, s, key, index(args_.dv), task.head, 1, terms[i], dv[i]);
    }
  }
};

// The sums of one output that a spec names: one for each element, row-major.
struct NamedSums {
  std::vector<Sum> sums;
  std::vector<std::int64_t> terms;
  bool told = true;  // false: nobody can tell which elements some pairs read
  explicit NamedSums(std::size_t count = 0) : sums(count), terms(count) {}

  void add(std::int64_t place, double value, double error) {
    if (place < 0) told = false;
    if (place < 0 || static_cast<std::size_t>(place) >= sums.size()) return;
    Sum& sum = sums[static_cast<std::size_t>(place)];
    sum.value += value;
    sum.error += error;
    sum.magnitude += std::abs(value);
    ++terms[static_cast<std::size_t>(place)];
  }
  void add(const NamedSums& other) {
    told = told && other.told;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i].value += other.sums[i].value;
      sums[i].error += other.sums[i].error;
      sums[i].magnitude += other.sums[i].magnitude;
      terms[i] += other.terms[i];
    }
  }
};
// A table with a gradient, or the sink logits.
struct Learned {
  std::string name;
  int table = -1;
  Tensor like;
  std::optional<Tensor> actual;

  std::size_t count() const {
    std::int64_t count = 1;
    for (int dim = 0; dim < like.rank; ++dim) count *= like.shape[dim];
    return static_cast<std::size_t>(count);
  }
};

std::vector<Learned> learned_of(const AttentionSpec& spec, const AttentionArgs& args) {
  std::vector<Learned> all;
  const auto named = [&](const std::string& name) -> std::optional<Tensor> {
    for (const NamedArgument& argument : args.named)
      if (argument.name == name)
        if (const auto* tensor = std::get_if<Tensor>(&argument.value)) return *tensor;
    return {};
  };
  for (std::size_t i = 0; i < spec.tables.size(); ++i) {
    const DeclaredTable& table = spec.tables[i];
    if (!table.grad) continue;
    const std::optional<Tensor> like = named(table.name);
    if (!like) refuse("table " + table.name + " is missing");
    all.push_back({gradient_name(table), static_cast<int>(i), *like, named(gradient_name(table))});
  }
  if (spec.sink_logits) {
    need(args.sink_logits, "sink_logits", 1);
    all.push_back({"d_sink_logits", -1, *args.sink_logits, args.d_sink_logits});
  }
  return all;
}

// Adds up what all rows give to tables and sink logits.
class NamedWorker : Worker {
 public:
  NamedWorker(const Backward& of, Softmaxes& softmaxes, const Visit& visit,
              const std::vector<Learned>& learned, std::vector<NamedSums>& all, std::mutex& mutex)
      : Worker(of, softmaxes, visit), learned_(learned), all_(all), mutex_(mutex) {
    for (const Learned& one : learned) sums_.emplace_back(one.count());
  }
  NamedWorker(const NamedWorker&) = delete;
  ~NamedWorker() {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < sums_.size(); ++i) all_[i].add(sums_[i]);
  }

  void run(const RowTask& task) {
    const Sequence& s = layout_.sequences[task.sequence];
    load_rows(task.sequence, task.head);
    load_keys(task.sequence, task.head);
    for (const int row : task.rows) {
      if (row >= s.seqlen_q) continue;
      make_pairs(task.sequence, task.head, row, 0, s.seqlen_k);
      for (std::size_t i = 0; i < learned_.size(); ++i) {
        if (learned_[i].table < 0) {
          add_sink(task.sequence, task.head, row, sums_[i]);
          continue;
        }
        for (const Formulas::ByElement& read : derivatives_.by_elements)
          if (read.table == static_cast<std::size_t>(learned_[i].table)) add_read(read, sums_[i]);
      }
    }
  }

 private:
  void add_read(const Formulas::ByElement& read, NamedSums& sums) const {
    for (std::size_t key = 0; key < pairs_.size(); ++key) {
      if (!pairs_[key].kept) continue;
      const auto [value, error] = times(pairs_[key], read.values[key], read.errors[key]);
      sums.add(read.places[key], value, error);
    }
  }
  void add_sink(int sequence, int head, int row, NamedSums& sums) {
    const double logit = sink_of(head);
    if (lse_[row] == -std::numeric_limits<double>::infinity() || gives_nothing_[row] ||
        logit == -std::numeric_limits<double>::infinity())
      return;
    const auto keys = static_cast<std::size_t>(layout_.sequences[sequence].seqlen_k);
    const Weight weight = softmaxes_of(sequence, head)[static_cast<std::size_t>(row)].weight(keys, logit, 0);
    const double value = -weight.value * delta_[row];
    sums.add(head, value,
             std::abs(delta_[row]) * weight.error() + (weight.most + least) * delta_error_[row] +
                 least * (std::abs(delta_[row]) + 1) + 0x1p-23 * std::abs(value));
  }

  const std::vector<Learned>& learned_;
  std::vector<NamedSums> sums_;
  std::vector<NamedSums>& all_;
  std::mutex& mutex_;
};

void visit_sums(std::size_t output, const Learned& learned, const NamedSums& sums, const Visit& visit) {
  const Rounding rounding = rounding_of(DType::fp32);
  for (std::size_t i = 0; i < sums.sums.size(); ++i) {
    const Sum& sum = sums.sums[i];
    const auto terms = sums.terms[i];
    const double error =
        sum.error + gamma(terms) * (sum.magnitude + sum.error) + least * static_cast<double>(terms);
    const double bound = !sums.told || !std::isfinite(sum.value) ? std::numeric_limits<double>::quiet_NaN()
                         : terms == 0                            ? 0
                                                                 : with_rounding(rounding, sum.value, error);
    std::int64_t index = 0, rest = static_cast<std::int64_t>(i);
    for (int dim = learned.like.rank - 1; learned.actual && dim >= 0; --dim) {
      index += rest % learned.like.shape[dim] * learned.actual->strides[dim];
      rest /= learned.like.shape[dim];
    }
    visit({.output = output,
           .place = {static_cast<std::int64_t>(i)},
           .index = index,
           .values = {&sum.value, 1},
           .bounds = {&bound, 1}});
  }
}

// Keys of each sequence's slot, padding included.
std::vector<int> slot_keys(const Backward& of) {
  std::vector<int> keys;
  for (const Sequence& s : of.layout.sequences) {
    const auto* const starts =
        of.spec.varlen ? static_cast<const std::int32_t*>(of.args.cu_seqlens_k->data) : nullptr;
    keys.push_back(starts ? starts[s.batch + 1] - starts[s.batch] : static_cast<int>(of.layout.k.shape[1]));
  }
  return keys;
}

}  // namespace

Oracle backward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options) {
  const Backward of{spec, args, options, Layout(spec, args)};
  const int rank = of.layout.rank();
  need(args.o, "o", rank);
  need(args.d_o, "do", rank);
  need(args.lse, "lse", rank - 1);
  const auto output = [](const char* name, const std::optional<Tensor>& actual, const Tensor& like,
                         const char* row) -> Output {
    return {
        name, {like.shape.begin(), like.shape.begin() + like.rank}, actual, {"batch", row, "head", "dim"}};
  };
  std::vector<Output> outputs = {output("dq", args.dq, of.layout.q, "row"),
                                 output("dk", args.dk, of.layout.k, "key"),
                                 output("dv", args.dv, of.layout.v, "key")};
  const std::vector<Learned> learned = learned_of(spec, args);
  for (const Learned& one : learned)
    outputs.push_back({one.name,
                       {one.like.shape.begin(), one.like.shape.begin() + one.like.rank},
                       one.actual,
                       {"element"}});
  return {std::move(outputs), [of, learned](const Visit& visit) {
            std::vector<int> rows_of;
            Softmaxes softmaxes;
            for (const Sequence& s : of.layout.sequences) {
              rows_of.push_back(s.rows);
              for (int head = 0; head < of.layout.heads_q; ++head)
                softmaxes.emplace_back(static_cast<std::size_t>(s.seqlen_q));
            }
            OracleOptions every_row = of.options;
            every_row.max_rows = 0;
            run_tasks(row_tasks(rows_of, of.layout.heads_q, group_rows, every_row), of.options,
                      [&] { return SoftmaxWorker(of, softmaxes, visit); });
            run_tasks(row_tasks(rows_of, of.layout.heads_q, group_rows, of.options), of.options,
                      [&] { return RowWorker(of, softmaxes, visit); });
            run_tasks(row_tasks(slot_keys(of), of.layout.heads_kv, group_rows, of.options), of.options,
                      [&] { return KeyWorker(of, softmaxes, visit); });
            if (learned.empty()) return;
            std::vector<NamedSums> sums;
            for (const Learned& one : learned) sums.emplace_back(one.count());
            std::mutex mutex;
            run_tasks(row_tasks(rows_of, of.layout.heads_q, group_rows, every_row), every_row,
                      [&] { return NamedWorker(of, softmaxes, visit, learned, sums, mutex); });
            for (std::size_t i = 0; i < learned.size(); ++i) visit_sums(3 + i, learned[i], sums[i], visit);
          }};
}

void fill_forward(const AttentionSpec& spec, const AttentionArgs& args) {
  AttentionSpec forward = spec;
  forward.op = Operation::forward;
  for (DeclaredTable& table : forward.tables) table.grad = false;
  forward_oracle(forward, args, {}).compute([&](const Expected& expected) {
    const Tensor& t = expected.output == 0 ? *args.o : *args.lse;
    for (std::size_t i = 0; i < expected.values.size(); ++i)
      store_element(t.data, t.dtype, expected.index + static_cast<std::int64_t>(i),
                    static_cast<float>(expected.values[i]));
  });
}

}  // namespace flashjit::verify
