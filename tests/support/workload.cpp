#include "tests/support/workload.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <iostream>
#include <limits>
#include <numeric>
#include <utility>

#include "codegen/spec/declarations.hpp"
#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/forward_bound.hpp"
#include "tools/verify/mask.hpp"
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
  Shape shape{batch, seqlen_q, seqlen_k, heads_q, heads_kv, page_size};
  if (spec.varlen) {
    shape.batch = static_cast<int>(lengths_q.size());
    shape.seqlen_q = longest(lengths_q);
  }
  if (key_layout(spec) == KeyLayout::packed) shape.seqlen_k = longest(lengths_k);
  return shape;
}

std::string Case::str() const {
  std::string text = spec.to_json() + " heads " + std::to_string(heads_q) + "/" + std::to_string(heads_kv);
  if (spec.varlen) {
    text += " lengths " + list_of(lengths_q) + " on " + list_of(lengths_k) + " of " +
            std::to_string(seqlen_k) + " spare " + std::to_string(spare_rows) + " max " +
            std::to_string(max_seqlen_q.value_or(-1)) + "," + std::to_string(max_seqlen_k.value_or(-1));
  } else {
    text += " batch " + std::to_string(batch) + " seqlens " + std::to_string(seqlen_q) + " on " +
            std::to_string(seqlen_k);
    if (!lengths_k.empty()) text += " lengths " + list_of(lengths_k);
  }
  if (spec.paged) text += " pages of " + std::to_string(page_size);
  text += std::string(" ") + name_of(layout) + "/" + name_of(layout_kv) + " " + name_of(data) +
          (poison == Poison::nan ? " nan" : " infinity");
  if (bitmasks) text += " bitmasks " + std::to_string(*bitmasks);
  if (softmax_scale) text += " scale " + std::to_string(*softmax_scale);
  if (spec.dropout) text += " dropout_p " + std::to_string(dropout_p);
  return text + " seed " + std::to_string(seed);
}

Workload::Workload(TestDevice& device, Case given) : device_(device), case_(std::move(given)) {
  const AttentionSpec& spec = case_.spec;
  if (device.only_prebuilds()) {
    compile(spec, Target::parse(device.target()), case_.shape(), cache_folder());
    throw Prebuilt{};
  }
  Shape all = case_.shape(), used = all;  // with and without the rows beyond the last sequence
  MaskTables tables;
  if (spec.varlen) {
    used.total_q = std::accumulate(case_.lengths_q.begin(), case_.lengths_q.end(), 0);
    all.total_q = used.total_q + case_.spare_rows;
    if (packed_keys()) {
      used.total_k = std::accumulate(case_.lengths_k.begin(), case_.lengths_k.end(), 0);
      all.total_k = used.total_k + case_.spare_rows;
    }
    const auto add_starts = [&](TensorMember argument, const std::vector<int>& lengths) {
      std::vector<std::int32_t> values(lengths.size() + 1);
      std::partial_sum(lengths.begin(), lengths.end(), values.begin() + 1);
      tables.push_back({argument, {static_cast<std::int64_t>(values.size())}, std::move(values)});
    };
    add_starts(&AttentionArgs::cu_seqlens_q, case_.lengths_q);
    if (packed_keys()) add_starts(&AttentionArgs::cu_seqlens_k, case_.lengths_k);
  }
  Shape longest = case_.shape();
  if (spec.varlen) {  // the lengths that the arguments below give
    longest.seqlen_q = static_cast<int>(std::min<std::int64_t>(std::max(longest.seqlen_q, 1), all.total_q));
    if (packed_keys())
      longest.seqlen_k = static_cast<int>(std::min<std::int64_t>(std::max(longest.seqlen_k, 1), all.total_k));
  }
  verify::MaskDataOptions mask_options = case_.masks.value_or(verify::MaskDataOptions{.hard = true});
  if (counts_keys(spec)) mask_options.lengths_k.assign(case_.lengths_k.begin(), case_.lengths_k.end());
  masks_ = verify::random_mask_data(spec, longest, case_.seed, mask_options);
  AttentionArgs starts;
  if (spec.varlen) starts.cu_seqlens_q = tables[0].view();
  if (packed_keys()) starts.cu_seqlens_k = tables[1].view();
  masks_.fit_lengths(spec, longest, starts);
  tables.insert(tables.end(), masks_.tables.begin(), masks_.tables.end());

  const bool for_gpu = Target::parse(device_.target()).is_cuda();
  for (std::size_t i = 0; i < num_arguments; ++i) {
    const Argument& argument = arguments[i];
    if (!has_argument(spec, argument)) continue;
    if (argument.role_in(case_.spec) == Role::input || argument.role_in(case_.spec) == Role::output) {
      const TensorMember member = argument.tensor();
      const bool of_bitmasks = member == &AttentionArgs::block_bitmasks;
      if (of_bitmasks && case_.bitmasks == 0) continue;
      const auto arranged = [&](const Shape& shape) {
        std::vector<std::int64_t> sizes = argument.layout.sizes(spec, shape);
        if (of_bitmasks && case_.bitmasks) sizes[0] = *case_.bitmasks;
        if (member == &AttentionArgs::lse || member == &AttentionArgs::dlse || sizes.size() == 1)
          return arrange_rows(sizes);
        if (argument.role == Role::table) return arrange(MemoryLayout::contiguous, sizes, DType::int32);
        if (member == &AttentionArgs::rotary_cos || member == &AttentionArgs::rotary_sin)
          return arrange_rows(sizes,
                              for_gpu ? 16 / static_cast<std::int64_t>(size_of(argument.dtype(spec))) : 1);
        const bool keys = member == &AttentionArgs::k || member == &AttentionArgs::v ||
                          member == &AttentionArgs::dk || member == &AttentionArgs::dv;
        return arrange(keys ? case_.layout_kv : case_.layout, sizes, argument.dtype(spec));
      };
      const TensorShape whole = arranged(all);
      tensors_[i] = make(argument.dtype(spec), whole);
      if (argument.role_in(case_.spec) == Role::output) {
        TensorShape elements = arranged(used);
        elements.strides = whole.strides;
        tensors_[i]->limit_elements(elements);
      }
      continue;
    }
    if (argument.needs == Condition(&AttentionSpec::offsets)) {
      const std::vector<std::int64_t>& offsets =
          argument.tensor() == &AttentionArgs::row_offset ? masks_.row_offset : masks_.key_offset;
      const bool same = std::adjacent_find(offsets.begin(), offsets.end(), std::not_equal_to<>()) ==
                        offsets.end();  // stride 0
      const auto batch = static_cast<std::int64_t>(offsets.size());
      tensors_[i] = make(DType::int64, TensorShape{.rank = 1, .shape = {batch}, .strides = {same ? 0 : 1}});
      auto* to = static_cast<std::int64_t*>(tensors_[i]->on_host().data);
      std::copy_n(offsets.begin(), same ? std::min<std::int64_t>(batch, 1) : batch, to);
    }
    for (MaskTable& table : tables) {
      if (table.argument != argument.tensor()) continue;
      const Tensor like = table.view();
      TensorShape shape{.rank = like.rank, .shape = like.shape, .strides = like.strides};
      const std::int64_t gap = argument.tensor() == &AttentionArgs::page_table ? 3 : 0;  // between its rows
      if (gap) shape.strides[0] += gap;
      tensors_[i] = make(DType::int32, shape);
      auto* to = static_cast<std::int32_t*>(tensors_[i]->on_host().data);
      const std::int64_t row = gap ? like.shape[1] : static_cast<std::int64_t>(table.values.size());
      for (std::size_t at = 0; at < table.values.size(); ++at)
        to[at + (row ? at / static_cast<std::size_t>(row) * static_cast<std::size_t>(gap) : 0)] =
            table.values[at];
    }
  }
  Shape sized = longest;
  sized.total_q = all.total_q, sized.total_k = all.total_k;
  make_named(sized);
  fill();
  for (std::size_t i = 0; i < num_arguments; ++i) {
    if (!tensors_[i]) continue;
    tensors_[i]->upload();
    host_args_.*arguments[i].tensor() = tensors_[i]->on_host();
    device_args_.*arguments[i].tensor() = tensors_[i]->on_device();
  }
  for (auto* args : {&host_args_, &device_args_}) {
    args->max_seqlen_q = case_.max_seqlen_q, args->max_seqlen_k = case_.max_seqlen_k;
    args->softmax_scale = case_.softmax_scale;
    if (spec.dropout) {
      args->dropout_p = case_.dropout_p;
      args->dropout_seed = verify::random_bits(case_.seed, 0);
      args->dropout_offset = case_.seed;
    }
    masks_.set_sizes(*args);
    const bool bounds = !masks_.tables.empty() || !spec.tables.empty() ||
                        info_of(spec.op).makes_lists;  // tables are as long as they say
    if (spec.varlen && bounds) args->max_seqlen_q = longest.seqlen_q;
    if (packed_keys() && bounds) args->max_seqlen_k = longest.seqlen_k;
  }
  host_args_.named = host_named_;
  device_args_.named = device_named_;
  if (info_of(spec.op).after) {
    verify::fill_forward(spec, host_args_);
    poison_unused_rows();
    for (const TensorMember member : {&AttentionArgs::o, &AttentionArgs::lse, &AttentionArgs::dlse})
      tensor(member).upload();
  }
}

void Workload::make_named(const Shape& shape) {
  named_ = verify::random_named_data(case_.spec, shape, case_.seed);
  for (verify::NamedTable& table : named_.tables)
    for (const verify::NamedTable& given : case_.named.tables)
      if (given.name == table.name) table = given;
  for (verify::NamedScalar& scalar : named_.scalars) {
    for (const verify::NamedScalar& given : case_.named.scalars)
      if (given.name == scalar.name) scalar = given;
    host_named_.emplace_back(scalar.name, scalar.value);
    device_named_.emplace_back(scalar.name, scalar.value);
  }
  for (const verify::NamedTable& table : named_.tables) {
    // The dimensions in another order in memory, with gaps.
    TensorShape to{.rank = static_cast<int>(table.shape.size())};
    std::int64_t stride = case_.layout == MemoryLayout::contiguous ? 1 : 3;
    for (int i = 0; i < to.rank; ++i) {
      const int dim = to.rank - 1 - (i + static_cast<int>(case_.seed % 3)) % to.rank;
      to.shape[dim] = table.shape[static_cast<std::size_t>(dim)];
      to.strides[dim] = stride;
      stride = stride * std::max<std::int64_t>(to.shape[dim], 1) + 1;
    }
    GuardedTensor& tensor = *named_tensors_.emplace_back(make(table.dtype, to));
    const std::size_t width = size_of(table.dtype);
    auto* const data = static_cast<std::byte*>(tensor.on_host().data);
    for (std::size_t i = 0; i < table.elements.size() / width; ++i) {
      std::int64_t at = 0;
      for (auto [dim, rest] = std::pair(to.rank - 1, static_cast<std::int64_t>(i)); dim >= 0;
           rest /= to.shape[dim], --dim)
        at += rest % to.shape[dim] * to.strides[dim];
      std::memcpy(data + at * static_cast<std::int64_t>(width), table.elements.data() + i * width, width);
    }
    tensor.upload();
    host_named_.emplace_back(table.name, tensor.on_host());
    device_named_.emplace_back(table.name, tensor.on_device());
    const int declared = find_declared(case_.spec.tables, table.name);
    if (!case_.spec.tables[static_cast<std::size_t>(declared)].grad) continue;
    const auto& [name, gradient] = named_outputs_.emplace_back(
        gradient_name(case_.spec.tables[static_cast<std::size_t>(declared)]), make(DType::fp32, to));
    gradient->upload();
    host_named_.emplace_back(name, gradient->on_host());
    device_named_.emplace_back(name, gradient->on_device());
  }
}

TensorShape Workload::arrange_rows(const std::vector<std::int64_t>& sizes, std::int64_t unit) const {
  const std::int64_t gap = case_.layout == MemoryLayout::contiguous ? 0 : 5;
  TensorShape shape;
  shape.rank = static_cast<int>(sizes.size());
  std::int64_t stride = 1;
  for (int i = shape.rank - 1; i >= 0; --i) {
    shape.shape[i] = sizes[i];
    shape.strides[i] = stride;
    stride = stride * sizes[i] + gap;
    if (gap) stride = (stride + unit - 1) / unit * unit;
  }
  return shape;
}

std::unique_ptr<GuardedTensor> Workload::make(DType dtype, const TensorShape& shape) {
  const bool before = (case_.seed + static_cast<std::uint64_t>(next_++)) % 2 == 0;
  return std::make_unique<GuardedTensor>(device_, dtype, shape, case_.poison,
                                         before ? GuardedTensor::Fence::before : GuardedTensor::Fence::after);
}

const Kernel& Workload::kernel(Engine& engine) {
  const Kernel& kernel = engine.get(case_.spec, case_.shape());
  Shape shape = case_.shape();
  if (case_.spec.varlen && args().q) shape.total_q = args().q->shape[0];
  if (packed_keys() && args().k) shape.total_k = args().k->shape[0];
  auto words = static_cast<std::int64_t>((kernel.workspace_bytes(shape) + 3) / 4);
  // On a CPU it begins at a multiple of 64 bytes, also if it ends at a fence.
  if (!device_.is_cuda()) words = (words + 15) / 16 * 16;
  std::optional<Tensor>& workspace = device_args_.workspace;
  if (words > 0 && (!workspace || workspace->shape[0] < words)) {
    workspaces_.push_back(make(DType::int32, {.rank = 1, .shape = {words}, .strides = {1}}));
    workspaces_.back()->upload();
    workspace = workspaces_.back()->on_device();
  }
  return kernel;
}

void Workload::reset() {
  for (std::size_t i = 0; i < num_arguments; ++i)
    if (tensors_[i] && arguments[i].role_in(case_.spec) == Role::output) tensors_[i]->poison_elements();
  for (const auto& [name, gradient] : named_outputs_) gradient->poison_elements();
  device_.synchronize();
}

testing::AssertionResult Workload::fetch() {
  device_.synchronize();
  for (std::size_t i = 0; i < num_arguments; ++i) {
    if (!tensors_[i]) continue;
    tensors_[i]->download();
    const auto untouched =
        tensors_[i]->was_not_touched(arguments[i].name, arguments[i].written_in(case_.spec));
    if (!untouched) return testing::AssertionFailure() << untouched.message() << "\n  in " << case_.str();
  }
  for (const auto& table : named_tensors_) {
    table->download();
    const auto untouched = table->was_not_touched("a table", false);
    if (!untouched) return testing::AssertionFailure() << untouched.message() << "\n  in " << case_.str();
  }
  for (const auto& [name, gradient] : named_outputs_) {
    gradient->download();
    const auto untouched = gradient->was_not_touched(name.c_str(), true);
    if (!untouched) return testing::AssertionFailure() << untouched.message() << "\n  in " << case_.str();
  }
  for (const auto& workspace : workspaces_) {
    workspace->download();
    const auto untouched = workspace->was_not_touched("workspace", true);
    if (!untouched) return testing::AssertionFailure() << untouched.message() << "\n  in " << case_.str();
  }
  return testing::AssertionSuccess();
}

verify::Report Workload::report() const {
  verify::OracleOptions options;
  const Target target = Target::parse(device_.target());
  options.largest_score = verify::largest_score(target);
  options.rounds_keys = verify::rounds_keys(case_.spec, target);
  options.repeated_scores =
      case_.data == Data::equal_scores || case_.data == Data::rising || case_.data == Data::falling;
  return verify::verify_outputs(case_.spec, host_args_, options);
}

testing::AssertionResult Workload::check(bool all_told) {
  if (const testing::AssertionResult fetched = fetch(); !fetched) return fetched;
  const verify::Report report = this->report();
  for (const verify::Worst& worst : report.worst) {
    if (worst.bound > 0) note_share(worst.error / worst.bound);
  }
  // Rows and keys that a spoilt one reaches are NaN.
  if (spoilt_ || !all_told ? report.wrong > 0 : !report.ok())
    return testing::AssertionFailure() << report.str() << "\n  in " << case_.str();
  return testing::AssertionSuccess();
}

std::vector<std::byte> Workload::outputs() {
  device_.synchronize();
  std::vector<std::byte> bits;
  for (std::size_t i = 0; i < num_arguments; ++i) {
    if (!tensors_[i] || arguments[i].role_in(case_.spec) != Role::output) continue;
    tensors_[i]->download();
    const std::vector<std::byte> more = tensors_[i]->elements();
    bits.insert(bits.end(), more.begin(), more.end());
  }
  for (const auto& [name, gradient] : named_outputs_) {
    gradient->download();
    const std::vector<std::byte> more = gradient->elements();
    bits.insert(bits.end(), more.begin(), more.end());
  }
  return bits;
}

testing::AssertionResult computes(TestDevice& device, const Case& given, bool all_told) {
  try {
    Workload workload(device, given);
    workload.kernel(device.engine()).launch(workload.args());
    return workload.check(all_told);
  } catch (const Prebuilt&) {
    return testing::AssertionSuccess();
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
