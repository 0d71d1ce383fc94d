#include "tests/support/workload.hpp"

#include <algorithm>
#include <atomic>
#include <iostream>
#include <limits>
#include <numeric>

#include "tools/verify/element.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::testing_support {
namespace {

const char* name_of(MemoryLayout layout) {
  constexpr const char* names[] = {"contiguous", "heads_first",  "batch_inside",
                                   "padded",     "sliced_heads", "odd"};
  return names[static_cast<int>(layout)];
}

const char* name_of(Data data) {
  constexpr const char* names[] = {"random",     "equal_scores", "rising",   "falling",  "huge_scores",
                                   "positive_v", "plain",        "outliers", "long_rows"};
  return names[static_cast<int>(data)];
}

std::string list_of(const std::vector<int>& values) {
  std::string text;
  for (const int value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "[" + text + "]";
}

// Applies f(element's index in the last dimension, row in the sequence dimension, value) -> value.
template <class F>
void transform(const Tensor& t, F&& f) {
  const int heads = t.rank - 2, rows = t.rank - 3;
  for (std::int64_t b = 0; b < (t.rank == 4 ? t.shape[0] : 1); ++b) {
    for (std::int64_t row = 0; row < t.shape[rows]; ++row) {
      for (std::int64_t h = 0; h < t.shape[heads]; ++h) {
        const std::int64_t at =
            (t.rank == 4 ? b * t.strides[0] : 0) + row * t.strides[rows] + h * t.strides[heads];
        for (std::int64_t c = 0; c < t.shape[t.rank - 1]; ++c) {
          const auto value = static_cast<float>(verify::load_element(t.data, t.dtype, at + c));
          verify::store_element(t.data, t.dtype, at + c, f(c, row, value));
        }
      }
    }
  }
}

std::atomic<double> share_of_bound = 0;

void note_share(double share) {
  double seen = share_of_bound;
  while (share > seen && !share_of_bound.compare_exchange_weak(seen, share)) {
  }
}

}  // namespace

Shape Case::shape() const {
  const auto longest = [](const std::vector<int>& lengths) {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  };
  Shape shape{batch, seqlen_q, seqlen_k, heads_q, heads_kv};
  if (spec.varlen) {
    shape.batch = static_cast<int>(lengths_q.size());
    shape.seqlen_q = longest(lengths_q);
    shape.seqlen_k = longest(lengths_k);
  }
  return shape;
}

std::string Case::str() const {
  std::string text = spec.to_json() + " heads " + std::to_string(heads_q) + "/" + std::to_string(heads_kv);
  if (spec.varlen) {
    text += " lengths " + list_of(lengths_q) + " on " + list_of(lengths_k) + " spare " +
            std::to_string(spare_rows) + " max " + std::to_string(max_seqlen_q) + "," +
            std::to_string(max_seqlen_k);
  } else {
    text += " batch " + std::to_string(batch) + " seqlens " + std::to_string(seqlen_q) + " on " +
            std::to_string(seqlen_k);
  }
  text += std::string(" ") + name_of(layout) + "/" + name_of(layout_kv) + " " + name_of(data) +
          (poison == Poison::nan ? " nan" : " infinity");
  if (softmax_scale) text += " scale " + std::to_string(*softmax_scale);
  if (spec.dropout) text += " dropout_p " + std::to_string(dropout_p);
  return text + " seed " + std::to_string(seed);
}

Workload::Workload(TestDevice& device, Case given) : device_(device), case_(std::move(given)) {
  const AttentionSpec& spec = case_.spec;
  const int dim = spec.head_dim, dim_v = spec.head_dim_v ? spec.head_dim_v : dim;
  const auto tensor = [&](MemoryLayout layout, int rows, int heads, int columns) {
    const std::vector<std::int64_t> shape =
        spec.varlen ? std::vector<std::int64_t>{rows, heads, columns}
                    : std::vector<std::int64_t>{case_.batch, rows, heads, columns};
    return make(spec.dtype, arrange(layout, shape));
  };
  const auto total = [&](const std::vector<int>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), case_.spare_rows);
  };
  const int rows_q = spec.varlen ? total(case_.lengths_q) : case_.seqlen_q;
  const int rows_k = spec.varlen ? total(case_.lengths_k) : case_.seqlen_k;
  q_ = tensor(case_.layout, rows_q, case_.heads_q, dim);
  k_ = tensor(case_.layout_kv, rows_k, case_.heads_kv, dim);
  v_ = tensor(case_.layout_kv, rows_k, case_.heads_kv, dim_v);
  o_ = tensor(case_.layout, rows_q, case_.heads_q, dim_v);
  if (spec.lse) {
    const std::int64_t gap = case_.layout == MemoryLayout::contiguous ? 0 : 5;
    const std::int64_t of_head = rows_q + gap, of_batch = case_.heads_q * of_head + gap;
    TensorShape shape;
    shape.rank = spec.varlen ? 2 : 3;
    if (spec.varlen) {
      shape.shape = {case_.heads_q, rows_q};
      shape.strides = {of_head, 1};
    } else {
      shape.shape = {case_.batch, case_.heads_q, rows_q};
      shape.strides = {of_batch, of_head, 1};
    }
    lse_ = make(DType::fp32, shape);
    if (spec.varlen) {
      shape.shape[1] -= case_.spare_rows;
      lse_->limit_elements(shape);
    }
  }
  if (spec.varlen) {
    const Tensor o = o_->on_host();
    o_->limit_elements(
        {.rank = 3, .shape = {o.shape[0] - case_.spare_rows, o.shape[1], o.shape[2]}, .strides = o.strides});
    const auto starts = [&](const std::vector<int>& lengths) {
      TensorShape shape;
      shape.rank = 1;
      shape.shape = {static_cast<std::int64_t>(lengths.size()) + 1};
      shape.strides = {1};
      auto tensor_of_starts = make(DType::int32, shape);
      auto* data = static_cast<std::int32_t*>(tensor_of_starts->on_host().data);
      data[0] = 0;
      std::partial_sum(lengths.begin(), lengths.end(), data + 1);
      return tensor_of_starts;
    };
    cu_seqlens_q_ = starts(case_.lengths_q);
    cu_seqlens_k_ = starts(case_.lengths_k);
  }
  Shape longest = case_.shape();
  if (spec.varlen) {  // as the arguments below say it
    longest.seqlen_q = std::min(std::max(longest.seqlen_q, 1), rows_q);
    longest.seqlen_k = std::min(std::max(longest.seqlen_k, 1), rows_k);
  }
  masks_ = verify::random_mask_data(spec, longest, case_.seed,
                                    case_.masks.value_or(verify::MaskDataOptions{.hard = true}));
  for (MaskTable& table : masks_.tables) {
    const Tensor like = table.view();
    mask_tables_.push_back(
        make(DType::int32, {.rank = like.rank, .shape = like.shape, .strides = like.strides}));
    std::copy(table.values.begin(), table.values.end(),
              static_cast<std::int32_t*>(mask_tables_.back()->on_host().data));
  }
  fill();
  for (auto* t : {&q_, &k_, &v_, &o_, &lse_, &cu_seqlens_q_, &cu_seqlens_k_}) {
    if (*t) (*t)->upload();
  }
  for (const auto& table : mask_tables_) table->upload();
  for (auto* args : {&host_args_, &device_args_}) {
    const auto view = [&](const std::unique_ptr<GuardedTensor>& t) -> std::optional<Tensor> {
      if (!t) return std::nullopt;
      return args == &host_args_ ? t->on_host() : t->on_device();
    };
    args->q = view(q_), args->k = view(k_), args->v = view(v_), args->o = view(o_), args->lse = view(lse_);
    args->cu_seqlens_q = view(cu_seqlens_q_), args->cu_seqlens_k = view(cu_seqlens_k_);
    args->max_seqlen_q = case_.max_seqlen_q, args->max_seqlen_k = case_.max_seqlen_k;
    args->softmax_scale = case_.softmax_scale;
    if (spec.dropout) {
      args->dropout_p = case_.dropout_p;
      args->dropout_seed = verify::random_bits(case_.seed, 0);
      args->dropout_offset = case_.seed;
    }
    for (std::size_t i = 0; i < mask_tables_.size(); ++i)
      args->*masks_.tables[i].argument = view(mask_tables_[i]);
    masks_.set_sizes(*args);
    if (spec.varlen && !masks_.tables.empty())
      args->max_seqlen_q = longest.seqlen_q, args->max_seqlen_k = longest.seqlen_k;
  }
}

std::unique_ptr<GuardedTensor> Workload::make(DType dtype, const TensorShape& shape) {
  const bool before = (case_.seed + static_cast<std::uint64_t>(next_++)) % 2 == 0;
  return std::make_unique<GuardedTensor>(device_, dtype, shape, case_.poison,
                                         before ? GuardedTensor::Fence::before : GuardedTensor::Fence::after);
}

void Workload::fill() {
  // What lies beyond the last sequence stays poisoned.
  const auto used = [&](GuardedTensor& tensor) {
    Tensor t = tensor.on_host();
    if (case_.spec.varlen) t.shape[0] -= case_.spare_rows;
    return t;
  };
  const Tensor q = used(*q_), k = used(*k_), v = used(*v_);
  verify::RandomOptions options;
  if (case_.data == Data::huge_scores) options.scale = 30;
  if (case_.data == Data::plain || case_.data == Data::long_rows) options.outlier_every = 0;
  if (case_.data == Data::plain || case_.data == Data::outliers) options.long_row_every = 0;
  verify::fill_random(q, case_.seed * 3, options);
  verify::fill_random(k, case_.seed * 3 + 1, options);
  options.scale = 1;
  verify::fill_random(v, case_.seed * 3 + 2, options);
  switch (case_.data) {
    case Data::random:
    case Data::huge_scores:
    case Data::plain:
    case Data::outliers:
    case Data::long_rows:
      break;
    case Data::equal_scores:
      transform(k, [](std::int64_t c, std::int64_t, float) { return static_cast<float>(c % 5) - 2.0f; });
      break;
    case Data::rising:
    case Data::falling:
      // Products of 3 and small multiples of 1/4: exact in every dtype.
      transform(q, [](std::int64_t c, std::int64_t, float) { return c < 8 ? 3.0f : 0.0f; });
      transform(k, [&](std::int64_t c, std::int64_t row, float) {
        const auto steps = static_cast<float>(row % 400) - 200.0f;
        return c < 8 ? (case_.data == Data::rising ? steps : -steps) / 4 : 0.0f;
      });
      break;
    case Data::positive_v:
      transform(v, [](std::int64_t, std::int64_t, float value) { return value + 3.0f; });
  }
  const float poison = case_.poison == Poison::nan ? std::numeric_limits<float>::quiet_NaN()
                                                   : std::numeric_limits<float>::infinity();
  for (const MaskTable& table : masks_.tables) {
    const auto fill_padding = [&](const Tensor& t) {
      for (std::int64_t b = 0; b < t.shape[0]; ++b)
        for (std::int64_t row = table.values[b]; row < t.shape[1]; ++row)
          for (std::int64_t h = 0; h < t.shape[2]; ++h)
            for (std::int64_t c = 0; c < t.shape[3]; ++c)
              verify::store_element(t.data, t.dtype,
                                    b * t.strides[0] + row * t.strides[1] + h * t.strides[2] + c, poison);
    };
    if (table.argument == &AttentionArgs::seqlens_q) fill_padding(q);
    if (table.argument == &AttentionArgs::seqlens_k) fill_padding(k), fill_padding(v);
  }
}

void Workload::reset() {
  o_->poison_elements();
  if (lse_) lse_->poison_elements();
  device_.synchronize();
}

testing::AssertionResult Workload::fetch() {
  device_.synchronize();
  std::vector<std::pair<const char*, GuardedTensor*>> tensors = {{"q", q_.get()},
                                                                 {"k", k_.get()},
                                                                 {"v", v_.get()},
                                                                 {"o", o_.get()},
                                                                 {"lse", lse_.get()},
                                                                 {"cu_seqlens_q", cu_seqlens_q_.get()},
                                                                 {"cu_seqlens_k", cu_seqlens_k_.get()}};
  for (std::size_t i = 0; i < mask_tables_.size(); ++i)
    tensors.emplace_back(verify::name_of(masks_.tables[i].argument), mask_tables_[i].get());
  for (const auto& [name, tensor] : tensors) {
    if (!tensor) continue;
    tensor->download();
    const auto untouched = tensor->was_not_touched(name, tensor == o_.get() || tensor == lse_.get());
    if (!untouched) return testing::AssertionFailure() << untouched.message() << "\n  in " << case_.str();
  }
  return testing::AssertionSuccess();
}

verify::Report Workload::report() const {
  verify::OracleOptions options;
  options.largest_score = verify::largest_score(Target::parse(device_.target()));
  options.repeated_scores =
      case_.data == Data::equal_scores || case_.data == Data::rising || case_.data == Data::falling;
  return verify::verify_outputs(case_.spec, host_args_, options);
}

testing::AssertionResult Workload::check() {
  if (const testing::AssertionResult fetched = fetch(); !fetched) return fetched;
  const verify::Report report = this->report();
  for (const verify::Worst& worst : report.worst) {
    if (worst.bound > 0) note_share(worst.error / worst.bound);
  }
  if (!report.ok()) return testing::AssertionFailure() << report.str() << "\n  in " << case_.str();
  return testing::AssertionSuccess();
}

std::vector<std::byte> Workload::outputs() {
  device_.synchronize();
  o_->download();
  std::vector<std::byte> bits = o_->elements();
  if (lse_) {
    lse_->download();
    const std::vector<std::byte> more = lse_->elements();
    bits.insert(bits.end(), more.begin(), more.end());
  }
  return bits;
}

testing::AssertionResult computes(TestDevice& device, const Case& given) {
  try {
    Workload workload(device, given);
    workload.kernel(device.engine()).launch(workload.args());
    return workload.check();
  } catch (const Error& error) {
    return testing::AssertionFailure() << to_string(error.code()) << ": " << error.message() << "\n"
                                       << error.detail() << "\n  in " << given.str();
  }
}

double take_share_of_bound() {
  return share_of_bound.exchange(0);
}

void ComputesOnEveryDevice::TearDown() {
  if (const double share = take_share_of_bound(); share > 0) {
    std::cout << "  at most " << verify::digits(share, 2) << " of the bound" << std::endl;
  }
}

}  // namespace flashjit::testing_support
