#include "tools/verify/oracle.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numbers>
#include <thread>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/layout.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::verify {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Rows of one head that share the conversion of K and V, and keys converted at a time.
constexpr int group_rows = 8;
constexpr int block_keys = 64;

using Vec = double __attribute__((vector_size(16)));
constexpr int lanes = 2;
constexpr int column_step = 4;  // columns of V at a time, in registers

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

// What the launch drops; tensors are in host memory here.
Dropout dropout_of(const AttentionSpec& spec, const AttentionArgs& args) {
  if (!spec.dropout) return {};
  if (!args.dropout_p) refuse("dropout_p is missing");
  Dropout dropout{.p = *args.dropout_p, .seed = args.dropout_seed.value_or(0), .offset = args.dropout_offset};
  const auto read = [](const Tensor& tensor, std::uint64_t& number) {
    std::memcpy(&number, tensor.data, sizeof number);
  };
  if (args.dropout_seed_tensor) read(*args.dropout_seed_tensor, dropout.seed);
  if (args.dropout_offset_tensor) read(*args.dropout_offset_tensor, dropout.offset);
  return dropout;
}

// One task: up to group_rows rows of one head.
struct Task {
  const Sequence* sequence;
  int head;
  std::vector<int> rows;
};

std::vector<Task> make_tasks(const Layout& layout, const OracleOptions& options) {
  std::int64_t all = 0;
  for (const Sequence& s : layout.sequences) all += static_cast<std::int64_t>(s.rows) * layout.heads_q;
  const bool sample = options.max_rows > 0 && all > options.max_rows;
  std::vector<Task> tasks;
  std::uint64_t draw = 0;
  for (const Sequence& s : layout.sequences) {
    for (int head = 0; head < layout.heads_q; ++head) {
      std::vector<int> rows;
      if (sample) {
        const auto share = static_cast<double>(options.max_rows) * s.rows / static_cast<double>(all);
        const int count = std::min(s.rows, std::max(2, static_cast<int>(share)));
        for (int i = 0; i < count; ++i) {  // one of every count-th part of the rows, and both ends
          const std::int64_t begin = static_cast<std::int64_t>(s.rows) * i / count;
          const std::int64_t end = static_cast<std::int64_t>(s.rows) * (i + 1) / count;
          const auto offset = random_bits(options.seed, draw++) % static_cast<std::uint64_t>(end - begin);
          rows.push_back(static_cast<int>(i == 0           ? 0
                                          : i + 1 == count ? end - 1
                                                           : begin + static_cast<int>(offset)));
        }
      } else {
        for (int row = 0; row < s.rows; ++row) rows.push_back(row);
      }
      for (std::size_t i = 0; i < rows.size(); i += group_rows) {
        tasks.push_back(
            {&s,
             head,
             {rows.begin() + static_cast<std::ptrdiff_t>(i),
              rows.begin() + static_cast<std::ptrdiff_t>(std::min(i + group_rows, rows.size()))}});
      }
    }
  }
  return tasks;
}

// The buffers of one thread.
class Worker {
 public:
  Worker(const AttentionSpec& spec, const AttentionArgs& args, const Layout& layout, double scale,
         const OracleOptions& options, const std::function<void(const ReferenceRow&)>& visit)
      : spec_(spec),
        args_(args),
        layout_(layout),
        scale_(scale),
        options_(options),
        visit_(visit),
        arithmetic_(arithmetic_of(spec.dtype)),
        dropout_(dropout_of(spec, args)),
        output_scale_(dropout_scale(dropout_.p)) {
    columns_ = (layout.head_dim_v + column_step - 1) / column_step * column_step;
    q_.resize(static_cast<std::size_t>(group_rows) * layout.head_dim);
    k_.resize(static_cast<std::size_t>(layout.head_dim) * block_keys);
    v_.resize(static_cast<std::size_t>(block_keys) * columns_);
    sums_.resize(static_cast<std::size_t>(group_rows) * 3 * columns_);
    bounds_.resize(columns_);
  }

  void run(const Task& task) {
    const Sequence& s = *task.sequence;
    keys_ = (s.seqlen_k + block_keys - 1) / block_keys * block_keys;
    reach_.clear();
    for (auto* array : {&score_, &weight_, &error_, &rounding_}) array->assign(task.rows.size() * keys_, 0.0);
    norm_.assign(keys_, 0.0);
    compute_kept(task);
    compute_scores(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r) compute_weights(r, s);
    if (spec_.dropout) drop_weights(task);
    compute_outputs(task);
    if (!reach_.empty()) compute_spread(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r) report(task, r);
  }

 private:
  // The fate of a key in a row.
  enum Kept : char { unseen, kept, dropped };

  struct RowState {
    double norm = 0, max = -infinity, lse = -infinity;
    double largest = 0;  // weight
    double weights_error = 0, growth = 0, floors = 0;
    int keys = 0;            // whose scores are above -infinity
    bool no_number = false;  // a score is NaN or infinite
    int vanishing = 0;       // of them, those that may be -infinity in float32
    bool may_be_nan = false;
    bool wide = false;  // reach_ has the row
  };

  void compute_kept(const Task& task) {
    const Sequence& s = *task.sequence;
    kept_.assign(task.rows.size() * keys_, 0);
    block_kept_.assign(keys_ / block_keys, 0);
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      rows_[r] = {};
      for (int key = 0; key < s.seqlen_k; ++key) {
        if (options_.keep && !options_.keep(s.batch, task.head, task.rows[r], key)) continue;
        if (!sees(spec_, args_, s, task.head, task.rows[r], key)) continue;
        kept_[r * keys_ + key] = kept;
        block_kept_[key / block_keys] = 1;
      }
    }
  }

  void compute_scores(const Task& task) {
    const Sequence& s = *task.sequence;
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
        const auto at = layout_.index(layout_.k, s.batch, s.k_begin + begin + j, layout_.head_kv(task.head));
        double squares = 0;
        for (int d = 0; d < dim; ++d) {
          const double value = load_element(layout_.k.data, layout_.k.dtype, at + d);
          k_[static_cast<std::size_t>(d) * block_keys + j] = value;
          squares += value * value;
        }
        norm_[begin + j] = std::sqrt(squares);
      }
      for (std::size_t r = 0; r < task.rows.size(); ++r) {
        constexpr int width = 8;  // vectors at a time, in registers
        for (int j = 0; j < block_keys; j += width * lanes) {
          Vec sums[width] = {};
          for (int d = 0; d < dim; ++d) {
            const double* row = &k_[static_cast<std::size_t>(d) * block_keys + j];
            for (int i = 0; i < width; ++i) sums[i] += q_[r * dim + d] * load(row + i * lanes);
          }
          for (int i = 0; i < width; ++i) store(&score_[r * keys_ + begin + j + i * lanes], scale_ * sums[i]);
        }
      }
    }
  }

  // weight_ = p, error_ = p e, rounding_ = what rounding P can add, reach_ = h of rows that are wide: see
  // error_bound.hpp.
  void compute_weights(std::size_t r, const Sequence& s) {
    RowState& row = rows_[r];
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
    // Just before: the kernel's own maximum is rounded.
    const double largest = options_.bound.largest_score * (1 - 0x1p-20);
    row.may_be_nan |= std::abs(row.max) * std::numbers::log2e > largest;
    double sum = 0;
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      weight_[base + key] = std::exp(score_[base + key] - row.max);
      sum += weight_[base + key];
    }
    row.lse = row.max + std::log(sum);
    row.largest = 1 / sum;
    const double of_sums = gamma(row.keys);
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      const double weight = weight_[base + key] /= sum;
      const double error = weight * (std::expm1(exponent_error(r, key)) + of_sums);
      error_[base + key] = error;
      row.weights_error += error;
      const double floor = std::min(weight, arithmetic_.weight_floor * row.largest);
      const double rounding = std::max(arithmetic_.weight_unit * weight, floor);
      rounding_[base + key] = options_.bound.repeated_scores ? rounding : rounding * rounding;
    }
    row.growth = std::log1p(row.weights_error);
    row.wide = !(row.weights_error < wide_weights_error);  // or NaN, of 0 times infinity
    if (row.wide) compute_reach(r, s, weighs);
  }

  // D.
  double exponent_error(std::size_t r, int key) const {
    const RowState& row = rows_[r];
    return score_error(layout_.head_dim, scale_ * row.norm * norm_[key], score_[r * keys_ + key], row.max) +
           arithmetic_.exp_error;
  }

  void compute_reach(std::size_t r, const Sequence& s, const auto& weighs) {
    RowState& row = rows_[r];
    const std::size_t base = r * keys_;
    // ln sum exp(s + sign D), relative to the largest score.
    const auto log_sum = [&](double sign) {
      const auto exponent = [&](int key) {
        return score_[base + key] - row.max + sign * exponent_error(r, key);
      };
      double top = -infinity, sum = 0;
      for (int key = 0; key < s.seqlen_k; ++key)
        if (weighs(key)) top = std::max(top, exponent(key));
      for (int key = 0; key < s.seqlen_k; ++key)
        if (weighs(key)) sum += std::exp(exponent(key) - top);
      return top + std::log(sum);
    };
    const double least = log_sum(-1);
    row.growth = log_sum(1) + std::log(row.largest) + gamma(row.keys);
    if (reach_.empty()) reach_.assign(group_rows * keys_, 0.0);
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!weighs(key)) continue;
      const double most = score_[base + key] - row.max + exponent_error(r, key) - least;
      const double reach = reach_[base + key] = std::exp(std::min(most, 0.0));
      row.floors += std::min(reach, arithmetic_.weight_floor);
    }
  }

  // Sums and errors of sums stay those of all weights.
  void drop_weights(const Task& task) {
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(task.sequence->seqlen_k));
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      dropout_row(dropout_, task.sequence->batch, task.head, task.rows[r], keep);
      for (std::size_t key = 0; key < keep.size(); ++key) {
        const std::size_t at = r * keys_ + key;
        if (keep[key] || !kept_[at]) continue;
        kept_[at] = dropped;
        weight_[at] = error_[at] = rounding_[at] = 0;
      }
    }
  }

  // V of the block's keys, as far as there are any.
  int load_values(const Task& task, int begin) {
    const Sequence& s = *task.sequence;
    const int count = std::min(block_keys, s.seqlen_k - begin);
    for (int j = 0; j < count; ++j) {
      const auto at = layout_.index(layout_.v, s.batch, s.k_begin + begin + j, layout_.head_kv(task.head));
      for (int c = 0; c < layout_.head_dim_v; ++c) {
        v_[static_cast<std::size_t>(j) * columns_ + c] =
            load_element(layout_.v.data, layout_.v.dtype, at + c);
      }
    }
    return count;
  }

  void compute_outputs(const Task& task) {
    const Sequence& s = *task.sequence;
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
            if (!kept_[base + j]) continue;  // what is not seen may hold NaN
            const double weight = weight_[base + j], error = error_[base + j], round = rounding_[base + j];
            for (int i = 0; i < width; ++i) {
              const Vec value = load(&v_[static_cast<std::size_t>(j) * columns_ + c + i * lanes]);
              const Vec size = absolute(value);
              o[i] += weight * value;
              magnitude[i] += error * size;
              rounding[i] += round * (options_.bound.repeated_scores ? size : value * value);
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
  void compute_spread(const Task& task) {
    const Sequence& s = *task.sequence;
    spread_.assign(task.rows.size() * 2 * columns_, 0.0);
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
          const double reach_and_floor = reach + std::min(reach, arithmetic_.weight_floor);
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

  // Whether every key of the row that is no number in this column of V has a weight that cannot vanish.
  bool surely_no_number(const Task& task, std::size_t r, std::size_t column) const {
    const Sequence& s = *task.sequence;
    for (int key = 0; key < s.seqlen_k; ++key) {
      const std::size_t at = r * keys_ + key;
      if (!kept_[at]) continue;
      const auto value_at = layout_.index(layout_.v, s.batch, s.k_begin + key, layout_.head_kv(task.head)) +
                            static_cast<std::int64_t>(column);
      if (std::isfinite(load_element(layout_.v.data, layout_.v.dtype, value_at))) continue;
      if (!(weight_[at] - error_[at] > 2 * arithmetic_.weight_floor * rows_[r].largest)) return false;
    }
    return true;
  }

  double bound_of(const Task& task, std::size_t r, std::size_t column) const {
    const RowState& state = rows_[r];
    const double* sums = &sums_[r * 3 * columns_];
    const double o = output_scale_ * sums[column];
    if (!std::isfinite(o))
      return surely_no_number(task, r, column) ? 0 : std::numeric_limits<double>::quiet_NaN();
    if (state.keys == 0) return 0;
    const double squares = sums[2 * columns_ + column];
    const double rounding = options_.bound.repeated_scores ? squares : 4 * std::sqrt(squares);
    const double bound = output_bound(arithmetic_, o, output_scale_ * sums[columns_ + column],
                                      state.weights_error, output_scale_ * rounding);
    if (!state.wide) return bound;
    const double* spread = &spread_[r * 2 * columns_];
    const double scaled = output_scale_ * (spread[column] + spread[columns_ + column]);
    return std::min(bound, wide_output_bound(arithmetic_, o, scaled, state.keys, state.floors));
  }

  void report(const Task& task, std::size_t r) {
    const RowState& state = rows_[r];
    double* const o = &sums_[r * 3 * columns_];
    const auto dim = static_cast<std::size_t>(layout_.head_dim_v);
    ReferenceRow row;
    row.batch = task.sequence->batch, row.head = task.head, row.row = task.rows[r];
    row.empty = state.keys == 0 && !state.no_number;
    row.may_be_nan = state.may_be_nan;
    row.may_be_empty = state.keys > 0 && state.vanishing == state.keys;
    row.lse = state.lse;
    if (state.no_number) {
      row.lse = std::numeric_limits<double>::quiet_NaN();
      std::fill_n(o, dim, row.lse);
    }
    if (!row.empty && !state.no_number) row.lse_bound = lse_bound(state.lse, state.growth);
    for (std::size_t c = 0; c < dim; ++c) {
      bounds_[c] = state.no_number ? 0 : bound_of(task, r, c);
      o[c] *= output_scale_;
    }
    row.o = {o, dim};
    row.o_bound = {bounds_.data(), dim};
    visit_(row);
  }

  const AttentionSpec& spec_;
  const AttentionArgs& args_;
  const Layout& layout_;
  const double scale_;
  const OracleOptions& options_;
  const std::function<void(const ReferenceRow&)>& visit_;
  const Arithmetic arithmetic_;
  const Dropout dropout_;
  const double output_scale_;
  std::size_t columns_ = 0;  // head_dim_v, padded
  std::size_t keys_ = 0;     // seqlen_k, padded
  RowState rows_[group_rows];
  std::vector<double> q_, k_, v_;                                 // [row][dim], [dim][key], [key][column]
  std::vector<double> score_, weight_, error_, rounding_, norm_;  // [row][key], the last [key]
  std::vector<double> reach_;                                     // [row][key]; empty where no row is wide
  std::vector<double> sums_, spread_, bounds_;  // [row][3][column], [row][2][column], [column]
  std::vector<char> kept_, block_kept_;
};

double resolved_scale(const AttentionArgs& args, int head_dim) {
  return args.softmax_scale ? static_cast<double>(*args.softmax_scale)
                            : 1 / std::sqrt(static_cast<double>(head_dim));
}

}  // namespace

void forward_reference(const AttentionSpec& spec, const AttentionArgs& args,
                       const std::function<void(const ReferenceRow&)>& visit, const OracleOptions& options) {
  const Layout layout(spec, args);
  const std::vector<Task> tasks = make_tasks(layout, options);
  const double scale = resolved_scale(args, layout.head_dim);
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    Worker worker(spec, args, layout, scale, options, visit);
    for (std::size_t i; (i = next++) < tasks.size();) worker.run(tasks[i]);
  };
  const unsigned processors = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t wanted =
      options.num_threads > 0 ? static_cast<std::size_t>(options.num_threads) : processors;
  std::vector<std::jthread> helpers;
  for (std::size_t i = 1; i < std::min(wanted, tasks.size()); ++i) helpers.emplace_back(work);
  work();
}

}  // namespace flashjit::verify
