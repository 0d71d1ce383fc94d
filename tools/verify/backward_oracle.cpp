#include "tools/verify/backward_oracle.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/dropout.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/error_bound.hpp"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/mask.hpp"
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
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
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

// What one pair of a row and a key adds.
struct Pair {
  bool kept = false;
  double w = 0, w_error = 0, w_rounding = 0;
  double g = 0, g_error = 0, g_rounding = 0;
};

class Worker {
 public:
  Worker(const Backward& of, const Visit& visit)
      : spec_(of.spec),
        args_(of.args),
        options_(of.options),
        layout_(of.layout),
        visit_(visit),
        scale_(args_.softmax_scale ? static_cast<double>(*args_.softmax_scale)
                                   : 1 / std::sqrt(static_cast<double>(layout_.head_dim))),
        dropout_(dropout_of(spec_, args_)),
        dropout_scale_(dropout_scale(dropout_.p)),
        rounding_(rounding_of(spec_.dtype)),
        gradient_rounding_(rounding_of(spec_.grad_dtype.value_or(spec_.dtype))) {}

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
    }
    keep_.assign(static_cast<std::size_t>(s.seqlen_k) * (spec_.dropout ? s.seqlen_q : 0), 1);
    for (int row = 0; spec_.dropout && row < s.seqlen_q; ++row)
      dropout_row(
          dropout_, s.batch, head, row,
          {keep_.data() + static_cast<std::size_t>(row) * s.seqlen_k, static_cast<std::size_t>(s.seqlen_k)});
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

  // Of the rows and keys that were loaded.
  Pair pair(int sequence, int head, int row, int key) const {
    const Sequence& s = layout_.sequences[sequence];
    Pair pair;
    if (lse_[row] == -std::numeric_limits<double>::infinity()) return pair;
    if (options_.keep && !options_.keep(s.batch, head, row, key)) return pair;
    if (!sees(spec_, args_, s, head, row, key)) return pair;
    pair.kept = true;
    const double x = spec_.dtype == DType::fp32 ? 0x1p-21 : 0x1p-13;
    const double score = scale_ * dot(q_[row], k_[key], q_.dim), p = std::exp(score - lse_[row]);
    const double d = gamma(q_.dim) * scale_ * q_.norms[row] * k_.norms[key] +
                     0x1p-22 * (std::abs(score) + std::abs(lse_[row]) + 1);
    const double e = std::expm1(d + x);
    const double m = !spec_.dropout ? 1
                     : keep_[static_cast<std::size_t>(row) * s.seqlen_k + static_cast<std::size_t>(key)]
                         ? dropout_scale_
                         : 0;
    const double product = m * dot(d_o_[row], v_[key], v_.dim);
    const double product_error = m * (gamma(v_.dim) * d_o_.norms[row] * v_.norms[key] + v_.dim * least);
    const bool rounds = spec_.dtype != DType::fp32;
    pair.w = m * p;
    pair.w_error = m * (p * e + least);
    pair.g = p * (product - delta_[row]);
    pair.g_error = std::abs(pair.g) * e + (p * (1 + e) + least) * (product_error + delta_error_[row]) +
                   (p * 0x1p-22 + least) * (std::abs(product) + std::abs(delta_[row])) + least;
    if (rounds) {
      pair.w_rounding = m > 0 ? rounding_.unit * pair.w + rounding_.floor : 0;
      pair.g_rounding = rounding_.unit * std::abs(pair.g) + rounding_.floor;
    }
    return pair;
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
  const Visit& visit_;
  const double scale_;
  const Dropout dropout_;
  const double dropout_scale_;
  const Rounding rounding_, gradient_rounding_;
  int rows_of_[2] = {-1, -1}, keys_of_[2] = {-1, -1};
  Vectors q_, d_o_, k_, v_;
  std::vector<double> lse_, delta_, delta_error_, values_, bounds_;
  std::vector<std::uint8_t> keep_;
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
      for (int key = 0; row < s.seqlen_q && key < s.seqlen_k; ++key) {
        const Pair p = pair(task.sequence, task.head, row, key);
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
      for (std::size_t i = 0; i < task.rows.size(); ++i) {
        for (int row = 0; task.rows[i] < s.seqlen_k && row < s.seqlen_q; ++row) {
          const Pair p = pair(task.sequence, head, row, task.rows[i]);
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
  return {{output("dq", args.dq, of.layout.q, "row"), output("dk", args.dk, of.layout.k, "key"),
           output("dv", args.dv, of.layout.v, "key")},
          [of](const Visit& visit) {
            std::vector<int> rows_of;
            for (const Sequence& s : of.layout.sequences) rows_of.push_back(s.rows);
            run_tasks(row_tasks(rows_of, of.layout.heads_q, group_rows, of.options), of.options,
                      [&] { return RowWorker(of, visit); });
            run_tasks(row_tasks(slot_keys(of), of.layout.heads_kv, group_rows, of.options), of.options,
                      [&] { return KeyWorker(of, visit); });
          }};
}

void fill_forward(const AttentionSpec& spec, const AttentionArgs& args) {
  AttentionSpec forward = spec;
  forward.op = Operation::forward;
  forward_oracle(forward, args, {}).compute([&](const Expected& expected) {
    const Tensor& t = expected.output == 0 ? *args.o : *args.lse;
    for (std::size_t i = 0; i < expected.values.size(); ++i)
      store_element(t.data, t.dtype, expected.index + static_cast<std::int64_t>(i),
                    static_cast<float>(expected.values[i]));
  });
}

}  // namespace flashjit::verify
