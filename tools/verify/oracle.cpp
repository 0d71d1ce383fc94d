#include "tools/verify/oracle.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/dropout.hpp"
#include "tools/verify/element.hpp"
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

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, "oracle: " + what);
}

const Tensor& need(const std::optional<Tensor>& tensor, const char* name, int rank) {
  if (!tensor) refuse(std::string(name) + " is missing");
  if (tensor->rank != rank) {
    refuse(std::string(name) + " has rank " + std::to_string(tensor->rank) + ", expected " +
           std::to_string(rank));
  }
  return *tensor;
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

// The problem's sizes and the way from (sequence, row, head) to an element.
class Layout {
 public:
  Layout(const AttentionSpec& spec, const AttentionArgs& args)
      : packed_(spec.varlen),
        q(need(args.q, "q", rank())),
        k(need(args.k, "k", rank())),
        v(need(args.v, "v", rank())) {
    head_dim = static_cast<int>(q.shape[rank() - 1]);
    head_dim_v = static_cast<int>(v.shape[rank() - 1]);
    heads_q = static_cast<int>(q.shape[rank() - 2]);
    heads_kv = static_cast<int>(k.shape[rank() - 2]);
    if (heads_kv > 0 && heads_q % heads_kv != 0) refuse("num_heads_q is not a multiple of num_heads_kv");
    if (packed_) {
      need(args.cu_seqlens_q, "cu_seqlens_q", 1);
      need(args.cu_seqlens_k, "cu_seqlens_k", 1);
    }
    sequences = sequences_of(spec, args);
  }

  int rank() const { return packed_ ? 3 : 4; }
  int head_kv(int head_q) const { return head_q / (heads_q / heads_kv); }
  // Element index of [row, head, 0] of q, k, v or o; `row` counted from the start of the tensor when packed.
  std::int64_t index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return row * t.strides[0] + head * t.strides[1];
    return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  }
  std::int64_t lse_index(const Tensor& t, int batch, std::int64_t row, int head) const {
    if (packed_) return head * t.strides[0] + row * t.strides[1];
    return batch * t.strides[0] + head * t.strides[1] + row * t.strides[2];
  }

 private:
  bool packed_;

 public:
  const Tensor &q, &k, &v;
  int head_dim, head_dim_v, heads_q, heads_kv;
  std::vector<Sequence> sequences;
};

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
    for (auto* array : {&score_, &weight_, &error_, &rounding_}) array->assign(task.rows.size() * keys_, 0.0);
    norm_.assign(keys_, 0.0);
    compute_kept(task);
    compute_scores(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r) compute_weights(r, s);
    if (spec_.dropout) drop_weights(task);
    compute_outputs(task);
    for (std::size_t r = 0; r < task.rows.size(); ++r) report(task, r);
  }

 private:
  struct RowState {
    double norm = 0, max = -infinity, lse = -infinity, weights_error = 0;
    int kept = 0;
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
        kept_[r * keys_ + key] = 1;
        block_kept_[key / block_keys] = 1;
        ++rows_[r].kept;
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

  // weight_ = p, error_ = p e, rounding_ = what rounding P can add: see error_bound.hpp.
  void compute_weights(std::size_t r, const Sequence& s) {
    RowState& row = rows_[r];
    const std::size_t base = r * keys_;
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (kept_[base + key]) row.max = std::max(row.max, score_[base + key]);
    }
    double sum = 0;
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!kept_[base + key]) continue;
      weight_[base + key] = std::exp(score_[base + key] - row.max);
      sum += weight_[base + key];
    }
    if (row.kept > 0) row.lse = row.max + std::log(sum);
    const double of_sums = gamma(row.kept);
    for (int key = 0; key < s.seqlen_k; ++key) {
      if (!kept_[base + key]) continue;
      const double weight = weight_[base + key] /= sum;
      const double off =
          score_error(layout_.head_dim, scale_ * row.norm * norm_[key], score_[base + key], row.max);
      const double error = weight * (std::expm1(off + arithmetic_.exp_error) + of_sums);
      error_[base + key] = error;
      row.weights_error += error;
      const double floor = std::min(weight, arithmetic_.weight_floor / sum);
      const double rounding = std::max(arithmetic_.weight_unit * weight, floor);
      rounding_[base + key] = options_.bound.repeated_scores ? rounding : rounding * rounding;
    }
  }

  // Sums and errors of sums stay those of all weights.
  void drop_weights(const Task& task) {
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(task.sequence->seqlen_k));
    for (std::size_t r = 0; r < task.rows.size(); ++r) {
      dropout_row(dropout_, task.sequence->batch, task.head, task.rows[r], keep);
      for (std::size_t key = 0; key < keep.size(); ++key)
        kept_[r * keys_ + key] &= static_cast<char>(keep[key]);
    }
  }

  void compute_outputs(const Task& task) {
    const Sequence& s = *task.sequence;
    constexpr int width = column_step / lanes;
    std::fill(sums_.begin(), sums_.end(), 0.0);
    for (int begin = 0; begin < s.seqlen_k; begin += block_keys) {
      if (!block_kept_[begin / block_keys]) continue;
      const int count = std::min(block_keys, s.seqlen_k - begin);
      for (int j = 0; j < count; ++j) {
        const auto at = layout_.index(layout_.v, s.batch, s.k_begin + begin + j, layout_.head_kv(task.head));
        for (int c = 0; c < layout_.head_dim_v; ++c) {
          v_[static_cast<std::size_t>(j) * columns_ + c] =
              load_element(layout_.v.data, layout_.v.dtype, at + c);
        }
      }
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
            if (!kept_[base + j]) continue;  // what is not kept may hold NaN
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

  void report(const Task& task, std::size_t r) {
    const RowState& state = rows_[r];
    double* const sums = &sums_[r * 3 * columns_];
    const auto dim = static_cast<std::size_t>(layout_.head_dim_v);
    if (spec_.dropout)
      for (std::size_t c = 0; c < dim; ++c)
        for (int i = 0; i < 3; ++i)
          sums[i * columns_ + c] *=
              i < 2 || options_.bound.repeated_scores ? output_scale_ : output_scale_ * output_scale_;
    ReferenceRow row{
        task.sequence->batch, task.head, task.rows[r], state.kept == 0, state.lse, 0, {sums, dim},
        {bounds_.data(), dim}};
    if (row.empty) {
      std::fill(bounds_.begin(), bounds_.end(), 0.0);
    } else {
      row.lse_bound = lse_bound(state.lse, state.weights_error);
      for (std::size_t c = 0; c < dim; ++c) {
        const double sum = sums[2 * columns_ + c];
        const double rounding = options_.bound.repeated_scores ? sum : 4 * std::sqrt(sum);
        bounds_[c] = output_bound(arithmetic_, sums[c], sums[columns_ + c], state.weights_error, rounding);
      }
    }
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
  std::vector<double> sums_, bounds_;                             // [row][3][column], [column]
  std::vector<char> kept_, block_kept_;
};

double resolved_scale(const AttentionArgs& args, int head_dim) {
  return args.softmax_scale ? static_cast<double>(*args.softmax_scale)
                            : 1 / std::sqrt(static_cast<double>(head_dim));
}

// Keeps the worst element and counts the wrong ones.
void compare(double actual, double expected, double bound, Worst& worst, std::int64_t& wrong,
             const auto& where) {
  const double error = actual == expected ? 0 : std::abs(actual - expected);  // equal infinities differ by 0
  const bool ok = error <= bound;
  wrong += ok ? 0 : 1;
  const auto excess = [](double e, double b) {
    return e <= b ? (b > 0 ? e / b : 0) : (e > b ? 1 + e - b : infinity);
  };
  if (!worst.where.empty() && excess(error, bound) <= excess(worst.error, worst.bound)) return;
  worst = {error, bound, actual, expected, where()};
}

std::string describe(const char* name, const Worst& worst) {
  if (worst.where.empty()) return {};
  char text[256];
  std::snprintf(text, sizeof text, "; worst %s: %s = %.9g, expected %.9g, error %.3g, bound %.3g", name,
                worst.where.c_str(), worst.actual, worst.expected, worst.error, worst.bound);
  return text;
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

std::string ForwardReport::str() const {
  return std::to_string(rows) + " rows, " + std::to_string(wrong) + " elements beyond their bound" +
         describe("o", o) + describe("lse", lse);
}

ForwardReport verify_forward(const AttentionSpec& spec, const AttentionArgs& args,
                             const OracleOptions& options) {
  const Layout layout(spec, args);
  const Tensor& o = need(args.o, "o", layout.rank());
  const Tensor* lse = spec.lse ? &need(args.lse, "lse", layout.rank() - 1) : nullptr;
  ForwardReport total;
  std::mutex mutex;
  forward_reference(
      spec, args,
      [&](const ReferenceRow& row) {
        ForwardReport report;
        const auto position = [&] {
          return ": batch " + std::to_string(row.batch) + ", row " + std::to_string(row.row) + ", head " +
                 std::to_string(row.head);
        };
        const std::int64_t in_tensor = layout.sequences[row.batch].q_begin + row.row;
        const std::int64_t at = layout.index(o, row.batch, in_tensor, row.head);
        for (std::size_t c = 0; c < row.o.size(); ++c) {
          compare(load_element(o.data, o.dtype, at + static_cast<std::int64_t>(c)), row.o[c], row.o_bound[c],
                  report.o, report.wrong, [&] { return "o" + position() + ", dim " + std::to_string(c); });
        }
        if (lse) {
          const double actual =
              load_element(lse->data, DType::fp32, layout.lse_index(*lse, row.batch, in_tensor, row.head));
          compare(actual, row.lse, row.lse_bound, report.lse, report.wrong,
                  [&] { return "lse" + position(); });
        }
        const std::lock_guard lock(mutex);
        ++total.rows;
        total.wrong += report.wrong;
        std::int64_t unused = 0;
        for (auto [mine, all] : {std::pair{&report.o, &total.o}, std::pair{&report.lse, &total.lse}}) {
          if (mine->where.empty()) continue;
          compare(mine->actual, mine->expected, mine->bound, *all, unused, [&] { return mine->where; });
        }
      },
      options);
  return total;
}

}  // namespace flashjit::verify
