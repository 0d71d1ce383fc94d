#include "tests/support/workload.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <limits>
#include <numeric>
#include <utility>

#include "codegen/declarations.hpp"
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

// Replaces each value by f(index in the last dimension, row, value).
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
  if (spec.op == Operation::decode || spec.paged)
    mask_options.lengths_k.assign(case_.lengths_k.begin(), case_.lengths_k.end());
  masks_ = verify::random_mask_data(spec, longest, case_.seed, mask_options);
  if (spec.varlen) {
    AttentionArgs starts{.cu_seqlens_q = tables[0].view()};
    if (packed_keys()) starts.cu_seqlens_k = tables[1].view();
    masks_.limit_lengths(starts);
  }
  tables.insert(tables.end(), masks_.tables.begin(), masks_.tables.end());

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
                        spec.op == Operation::make_block_lists;  // tables are as long as they say
    if (spec.varlen && bounds) args->max_seqlen_q = longest.seqlen_q;
    if (packed_keys() && bounds) args->max_seqlen_k = longest.seqlen_k;
  }
  host_args_.named = host_named_;
  device_args_.named = device_named_;
  if (spec.op == Operation::backward) {
    verify::fill_forward(spec, host_args_);
    tensor(&AttentionArgs::o).upload();
    tensor(&AttentionArgs::lse).upload();
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

TensorShape Workload::arrange_rows(const std::vector<std::int64_t>& sizes) const {
  const std::int64_t gap = case_.layout == MemoryLayout::contiguous ? 0 : 5;
  TensorShape shape;
  shape.rank = static_cast<int>(sizes.size());
  std::int64_t stride = 1;
  for (int i = shape.rank - 1; i >= 0; --i) {
    shape.shape[i] = sizes[i];
    shape.strides[i] = stride;
    stride = stride * sizes[i] + gap;
  }
  return shape;
}

std::unique_ptr<GuardedTensor> Workload::make(DType dtype, const TensorShape& shape) {
  const bool before = (case_.seed + static_cast<std::uint64_t>(next_++)) % 2 == 0;
  return std::make_unique<GuardedTensor>(device_, dtype, shape, case_.poison,
                                         before ? GuardedTensor::Fence::before : GuardedTensor::Fence::after);
}

void Workload::fill() {
  if (case_.spec.op == Operation::make_block_lists) return;  // it reads no elements
  // Memory beyond the last sequence stays poisoned.
  const auto used = [&](GuardedTensor& tensor, bool is_packed) {
    Tensor t = tensor.on_host();
    if (is_packed) t.shape[0] -= case_.spare_rows;
    return t;
  };
  const Tensor q = used(this->q(), case_.spec.varlen), k = used(this->k(), packed_keys()),
               v = used(this->v(), packed_keys());
  verify::RandomOptions options;
  if (case_.data == Data::huge_scores) options.scale = 30;
  if (case_.data == Data::plain || case_.data == Data::long_rows) options.outlier_every = 0;
  if (case_.data == Data::plain || case_.data == Data::outliers) options.long_row_every = 0;
  verify::fill_random(q, case_.seed * 3, options);
  // Stored values and scales whose products are like those of other dtypes.
  const float stored = case_.spec.kv_dtype == DType::int8 ? 40 : 1;
  options.scale *= stored;
  verify::fill_random(k, case_.seed * 3 + 1, options);
  options.scale = stored;
  verify::fill_random(v, case_.seed * 3 + 2, options);
  if (case_.spec.kv_dtype)
    for (const TensorMember member :
         {TensorMember(&AttentionArgs::k_scale), TensorMember(&AttentionArgs::v_scale)})
      fill_scales(tensor(member).on_host(), 1 / stored,
                  member == &AttentionArgs::v_scale && case_.spec.kv_scale == KvScale::token_head);
  if (case_.spec.sink_logits) {
    // Above and below what rows' sums usually are.
    const Tensor sinks = tensor(&AttentionArgs::sink_logits).on_host();
    for (std::int64_t h = 0; h < sinks.shape[0]; ++h)
      static_cast<float*>(sinks.data)[h * sinks.strides[0]] =
          static_cast<float>(verify::random_bits(case_.seed, static_cast<std::uint64_t>(h)) % 64) / 4 - 6;
  }
  if (case_.spec.op == Operation::backward) {
    verify::fill_random(used(tensor(&AttentionArgs::d_o), case_.spec.varlen), case_.seed * 3 + 3, options);
    const Tensor dlse = tensor(&AttentionArgs::dlse).on_host();
    std::int64_t last = 0;
    bool empty = false;
    for (int i = 0; i < dlse.rank; ++i) {
      last += (dlse.shape[i] - 1) * dlse.strides[i];
      empty |= dlse.shape[i] == 0;
    }
    for (std::int64_t i = 0; i <= last && !empty; ++i)
      static_cast<float*>(dlse.data)[i] = static_cast<float>(i % 7 - 3) / 4;
  }
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
      // Products of 3 and small multiples of 1/4 are exact in every dtype.
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
  const AttentionSpec& spec = case_.spec;
  for (const MaskTable& table : masks_.tables) {
    const auto fill_padding = [&](const Tensor& t, bool is_packed, const std::vector<int>& lengths) {
      std::int64_t first = 0;
      for (std::size_t b = 0; b < table.values.size(); ++b) {
        const std::int64_t rows = is_packed ? lengths[b] : t.shape[1];
        const int at = is_packed ? 0 : 1;  // the dimension of rows
        for (std::int64_t row = table.values[b]; row < rows; ++row)
          for (std::int64_t h = 0; h < t.shape[at + 1]; ++h)
            for (std::int64_t c = 0; c < t.shape[at + 2]; ++c)
              verify::store_element(t.data, t.dtype,
                                    (is_packed ? 0 : static_cast<std::int64_t>(b) * t.strides[0]) +
                                        (first + row) * t.strides[at] + h * t.strides[at + 1] + c,
                                    poison);
        if (is_packed) first += rows;
      }
    };
    if (table.argument == &AttentionArgs::seqlens_q) {
      fill_padding(q, spec.varlen, case_.lengths_q);
      if (spec.op == Operation::backward)
        fill_padding(tensor(&AttentionArgs::d_o).on_host(), spec.varlen, case_.lengths_q);
    }
    if (table.argument == &AttentionArgs::seqlens_k && !spec.paged)
      for (const Tensor& t : of_keys()) fill_padding(t, packed_keys(), case_.lengths_k);
  }
  if (spec.paged) poison_stale_slots(poison);
}

void Workload::spoil() {
  spoilt_ = true;
  const AttentionSpec& spec = case_.spec;
  const AttentionArgs& args = host_args_;
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  std::uint64_t draws = 0;
  // Where a row or key of a head begins.
  const auto place = [&](const Tensor& t, int batch, std::int64_t row, int head) {
    return spec.varlen ? row * t.strides[0] + head * t.strides[1]
                       : batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
  };
  const auto fill = [](const Tensor& t, std::int64_t at, float value) {
    for (std::int64_t c = 0; c < t.shape[t.rank - 1]; ++c)
      verify::store_element(t.data, t.dtype, at + c, value);
  };
  const auto draw = [&](int length) {
    return length == 0
               ? -1
               : static_cast<int>(verify::random_bits(case_.seed, draws++) % static_cast<unsigned>(length));
  };
  for (const verify::Sequence& s : verify::sequences_of(spec, args))
    for (int head_kv = 0; head_kv < case_.heads_kv; ++head_kv) {
      const int in_k = draw(s.seqlen_k), in_v = draw(s.seqlen_k);
      if (in_k >= 0) fill(*args.k, place(*args.k, s.batch, s.k_begin + in_k, head_kv), nan);
      if (in_v >= 0) fill(*args.v, place(*args.v, s.batch, s.k_begin + in_v, head_kv), infinity);
      const int group = case_.heads_q / case_.heads_kv;
      for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
        const int in_q = draw(s.seqlen_q), in_do = draw(s.seqlen_q);
        if (in_q >= 0) fill(*args.q, place(*args.q, s.batch, s.q_begin + in_q, head), infinity);
        if (in_do >= 0) fill(*args.d_o, place(*args.d_o, s.batch, s.q_begin + in_do, head), nan);
        for (int row = 0; row < s.seqlen_q; ++row) {
          const auto sees = [&](int key) { return verify::sees(spec, args, s, head, row, key); };
          bool of_k = false;
          for (int key = 0; key < s.seqlen_k && row == in_q; ++key) of_k |= sees(key);
          of_k |= in_k >= 0 && sees(in_k);
          if (of_k || (in_v >= 0 && sees(in_v)))
            fill(*args.o, place(*args.o, s.batch, s.q_begin + row, head), nan);
          const Tensor& lse = *args.lse;
          const std::int64_t at =
              spec.varlen ? head * lse.strides[0] : s.batch * lse.strides[0] + head * lse.strides[1];
          if (of_k) static_cast<float*>(lse.data)[at + s.q_begin + row] = nan;
        }
      }
    }
  for (const TensorMember member : {&AttentionArgs::q, &AttentionArgs::k, &AttentionArgs::v,
                                    &AttentionArgs::d_o, &AttentionArgs::o, &AttentionArgs::lse})
    tensor(member).upload();
}

// From half to twice `usual`, by each element's index.
void Workload::fill_scales(const Tensor& t, float usual, bool wide) const {
  for (std::int64_t i = 0; i < t.shape[0]; ++i)
    for (std::int64_t j = 0; j < (t.rank > 1 ? t.shape[1] : 1); ++j)
      for (std::int64_t h = 0; h < (t.rank > 2 ? t.shape[2] : 1); ++h) {
        const auto place = static_cast<std::uint64_t>((i * 1000 + j) * 1000 + h);
        const std::uint64_t bits = verify::random_bits(case_.seed, place);
        const auto share = static_cast<float>(bits % 48);
        int exponent = wide && bits >> 8 & 1 ? static_cast<int>(bits >> 9 & 15) - 11 : 0;
        if (wide && j < 70 && t.shape[1] > 70) exponent -= 18;
        static_cast<float*>(t.data)[i * t.strides[0] + (t.rank > 1 ? j * t.strides[1] : 0) +
                                    (t.rank > 2 ? h * t.strides[2] : 0)] =
            std::ldexp(usual * (0.5f + share / 32), exponent);
      }
}

std::vector<Tensor> Workload::of_keys() {
  std::vector<Tensor> all = {this->k().on_host(), this->v().on_host()};
  if (case_.spec.kv_scale != KvScale::token_head) return all;
  for (const TensorMember member :
       {TensorMember(&AttentionArgs::k_scale), TensorMember(&AttentionArgs::v_scale)}) {
    Tensor scales = tensor(member).on_host();
    scales.shape[scales.rank] = scales.strides[scales.rank] = 1;
    ++scales.rank;
    all.push_back(scales);
  }
  return all;
}

AttentionArgs Workload::lengths_of_host() const {
  AttentionArgs args;
  for (std::size_t i = 0; i < num_arguments; ++i)
    if (tensors_[i]) args.*arguments[i].tensor() = tensors_[i]->on_host();
  return args;
}

// Keys that no sequence has hold poison.
void Workload::poison_stale_slots(float poison) {
  const Tensor k = this->k().on_host();
  const Tensor pages = tensor(&AttentionArgs::page_table).on_host();
  std::vector<char> has_key(static_cast<std::size_t>(k.shape[0] * k.shape[1]));
  for (const verify::Sequence& s : verify::sequences_of(case_.spec, lengths_of_host()))
    for (std::int64_t key = 0; key < s.seqlen_k; ++key) {
      const std::int64_t entry = s.batch * pages.strides[0] + key / k.shape[1];
      const std::int32_t page = static_cast<const std::int32_t*>(pages.data)[entry];
      if (page >= 0 && page < k.shape[0])
        has_key[static_cast<std::size_t>(page * k.shape[1] + key % k.shape[1])] = 1;
    }
  for (const Tensor& t : of_keys())
    for (std::int64_t slot = 0; slot < t.shape[0] * t.shape[1]; ++slot)
      for (std::int64_t h = 0; h < t.shape[2] && !has_key[static_cast<std::size_t>(slot)]; ++h)
        for (std::int64_t c = 0; c < t.shape[3]; ++c)
          verify::store_element(
              t.data, t.dtype,
              slot / t.shape[1] * t.strides[0] + slot % t.shape[1] * t.strides[1] + h * t.strides[2] + c,
              poison);
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
        tensors_[i]->was_not_touched(arguments[i].name, arguments[i].role_in(case_.spec) == Role::output);
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
  // Rows and keys that a spoilt one reaches are NaN.
  if (spoilt_ ? report.wrong > 0 : !report.ok())
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

testing::AssertionResult computes(TestDevice& device, const Case& given) {
  try {
    Workload workload(device, given);
    workload.kernel(device.engine()).launch(workload.args());
    return workload.check();
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
