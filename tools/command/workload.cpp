#include "tools/command/workload.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <new>
#include <utility>

#include "codegen/base/suggest.hpp"
#include "codegen/spec/declarations.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "runtime/tune/mask_tables.hpp"
#include "runtime/tune/named_tables.hpp"
#include "tools/verify/backward_oracle.hpp"
#include "tools/verify/block_lists_oracle.hpp"
#include "tools/verify/ds_mla.hpp"
#include "tools/verify/mask.hpp"
#include "tools/verify/npy.hpp"

namespace flashjit::command {
namespace {

void require_length(std::int64_t length) {
  if (length <= longest_sequence) return;
  throw Error(ErrorCode::invalid_argument, "a sequence of " + std::to_string(length) +
                                               " tokens was asked for, " + std::to_string(longest_sequence) +
                                               " are the most");
}

// Starts of `batch` packed sequences. The first has the greatest length, the others between a quarter of it
// and all of it.
HostTensor random_lengths(int batch, int longest, std::uint64_t seed) {
  HostTensor starts(DType::int32, {std::int64_t{batch} + 1});
  auto* at = static_cast<std::int32_t*>(starts.view().data);
  at[0] = 0;
  for (int b = 0; b < batch; ++b) {
    const int shortest = longest / 4;
    const auto range = static_cast<std::uint64_t>(longest - shortest + 1);
    const int length = b == 0 ? longest : shortest + static_cast<int>(verify::random_bits(seed, b) % range);
    if (at[b] > std::numeric_limits<std::int32_t>::max() - length)
      throw Error(ErrorCode::invalid_argument,
                  "the packed sequences of batch " + std::to_string(batch) +
                      " have more than 2147483647 tokens in all; a smaller batch "
                      "would work");
    at[b + 1] = at[b] + length;
  }
  return starts;
}

// As many as the table names: fewer than rows of the longest length would have.
std::int64_t num_pages(const verify::MaskData& data) {
  for (const MaskTable& table : data.tables)
    if (table.argument == &AttentionArgs::page_table && !table.values.empty())
      return std::int64_t{*std::max_element(table.values.begin(), table.values.end())} + 1;
  return 0;
}

int longest_of(const Tensor& starts) {
  const auto* at = static_cast<const std::int32_t*>(starts.data);
  std::int32_t longest = 0;
  for (std::int64_t b = 0; b + 1 < starts.shape[0]; ++b) longest = std::max(longest, at[b + 1] - at[b]);
  return longest;
}

// Places of each batch entry's cache that hold what a launch writes, if there is no cache that tells.
std::int64_t places_written(const AttentionArgs& args, const Shape& shape) {
  std::int64_t places = 1;
  if (const std::optional<Tensor>& slots = args.to_slots ? args.to_slots : args.slots) {
    const auto* const at = static_cast<const std::int64_t*>(slots->data);
    const std::int64_t count =
        *product_of(std::span(slots->shape).first(static_cast<std::size_t>(slots->rank)));
    for (std::int64_t i = 0; i < count; ++i) places = std::max(places, at[i] / std::max(shape.batch, 1) + 1);
  } else if (args.append_positions) {
    const auto* const first = static_cast<const std::int32_t*>(args.append_positions->data);
    const auto* const starts =
        args.cu_seqlens_q ? static_cast<const std::int32_t*>(args.cu_seqlens_q->data) : nullptr;
    const std::int64_t entries = std::min<std::int64_t>(shape.batch, args.append_positions->shape[0]);
    for (std::int64_t b = 0; b < entries; ++b)
      places = std::max<std::int64_t>(
          places, std::int64_t{first[b]} + (starts ? starts[b + 1] - starts[b] : shape.seqlen_q));
  }
  return places;
}

HostTensor read_tensor(const std::string& path, const flashjit::Argument& argument,
                       const AttentionSpec& spec) {
  const verify::NpyArray array = verify::read_npy(path);
  const int rank = argument.rank_of(spec);
  if (static_cast<int>(array.shape.size()) != rank) {
    throw Error(ErrorCode::invalid_argument, path + ": " + argument.name + " has " +
                                                 std::to_string(array.shape.size()) +
                                                 " dimensions, expected " + std::to_string(rank));
  }
  const std::vector<std::byte> elements = verify::elements_as(array, argument.dtype(spec));
  HostTensor tensor(argument.dtype(spec), array.shape);
  std::memcpy(tensor.view().data, elements.data(), elements.size());
  return tensor;
}

}  // namespace

HostTensor::HostTensor(DType dtype, std::vector<std::int64_t> shape) {
  const auto elements = product_of(shape);
  if (!elements || *elements >> 56 != 0) throw std::bad_alloc();  // beyond any address
  bytes_ = static_cast<std::size_t>(*elements) * size_of(dtype);
  memory_.reset(std::aligned_alloc(64, (bytes_ + 64) / 64 * 64));
  if (!memory_) throw std::bad_alloc();
  view_ = Tensor::contiguous(memory_.get(), dtype, {}, shape);
}

void HostTensor::Free::operator()(void* p) const {
  std::free(p);
}

NamedValues named_values(const AttentionSpec& spec, const Shape& shape,
                         const std::vector<std::string>& given) {
  const auto refuse = [](const std::string& what) {
    throw Error(ErrorCode::invalid_argument, "--named " + what);
  };
  NamedValues values;
  std::vector<TypicalTable> typical;
  std::vector<std::string> files(spec.tables.size());
  values.gradient_files.resize(spec.tables.size());
  for (const DeclaredScalar& scalar : spec.scalars)
    values.scalars.emplace_back(scalar.name, typical_scalar(scalar, shape));
  for (const std::string& text : given) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) refuse(in_quotes(text) + " is not NAME=VALUE; cap=30 would work");
    const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
    if (const int table = find_declared(spec.tables, name); table >= 0) {
      files[static_cast<std::size_t>(table)] = value;
      continue;
    }
    const auto learned =
        std::find_if(spec.tables.begin(), spec.tables.end(),
                     [&](const DeclaredTable& table) { return is_gradient_name(name, table); });
    if (learned != spec.tables.end()) {
      values.gradient_files[static_cast<std::size_t>(learned - spec.tables.begin())] = value;
      continue;
    }
    const int scalar = find_declared(spec.scalars, name);
    if (scalar < 0) {
      std::vector<std::string_view> known;
      for (const DeclaredTable& table : spec.tables) known.push_back(table.name);
      for (const DeclaredScalar& one : spec.scalars) known.push_back(one.name);
      refuse(in_quotes(text) + ": the spec declares " +
             (known.empty() ? "no tables and scalars" : listed(known) + did_you_mean(name, known)));
    }
    double number = 0;
    const char* const end = value.data() + value.size();
    if (const auto read = std::from_chars(value.data(), end, number);
        read.ec != std::errc() || read.ptr != end)
      refuse(in_quotes(text) + ": " + name + " is a scalar; " + name + "=30 would work");
    values.scalars[static_cast<std::size_t>(scalar)] = {spec.scalars[static_cast<std::size_t>(scalar)].name,
                                                        number};
  }
  AttentionSpec generated = spec;  // without the tables of files, which may be too large to generate
  std::erase_if(generated.tables, [&](const DeclaredTable& table) {
    return !files[static_cast<std::size_t>(find_declared(spec.tables, table.name))].empty();
  });
  typical = typical_named_tables(generated, shape);
  for (std::size_t i = 0; i < spec.tables.size(); ++i) {
    const DeclaredTable& table = spec.tables[i];
    if (files[i].empty()) {
      const auto made = std::find_if(typical.begin(), typical.end(), [&](const TypicalTable& one) {
        return one.declared->name == table.name;
      });
      HostTensor tensor(table.dtype, made->shape);
      std::memcpy(tensor.view().data, made->elements.data(), made->elements.size());
      values.tables.emplace_back(table.name, std::move(tensor));
      continue;
    }
    const verify::NpyArray array = verify::read_npy(files[i]);
    if (array.shape.size() != table.shape.size())
      refuse(in_quotes(table.name + "=" + files[i]) + " has " + std::to_string(array.shape.size()) +
             " dimensions, the spec declares " + shape_text(table.shape, ""));
    const std::vector<std::byte> elements = verify::elements_as(array, table.dtype);
    HostTensor tensor(table.dtype, array.shape);
    std::memcpy(tensor.view().data, elements.data(), elements.size());
    values.tables.emplace_back(table.name, std::move(tensor));
  }
  return values;
}

Workload Workload::generate(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                            const MaskOptions& masks, const verify::RandomOptions& numbers) {
  require_length(shape.seqlen_q);
  require_length(shape.seqlen_k);
  if (!masks.lengths_k.empty() && !counts_keys(spec))
    throw Error(ErrorCode::invalid_argument,
                std::string("lengths of keys were given, but a launch of this ") + to_string(spec.op) +
                    " has none; op decode, or op forward with \"paged\": true, would work");
  Workload work(spec);
  work.shape_ = shape;
  Shape sized = shape;
  if (has_argument(spec, argument_of(&AttentionArgs::cu_seqlens_q))) {
    HostTensor starts_q = random_lengths(shape.batch, shape.seqlen_q, seed);
    sized.total_q = static_cast<const std::int32_t*>(starts_q.view().data)[shape.batch];
    work.add(argument_of(&AttentionArgs::cu_seqlens_q), std::move(starts_q));
  }
  if (has_argument(spec, argument_of(&AttentionArgs::cu_seqlens_k))) {
    HostTensor starts_k = random_lengths(shape.batch, shape.seqlen_k, seed + 1);
    sized.total_k = static_cast<const std::int32_t*>(starts_k.view().data)[shape.batch];
    work.add(argument_of(&AttentionArgs::cu_seqlens_k), std::move(starts_k));
  }
  verify::MaskData data = masks.generate(spec, shape, seed);
  std::uint64_t own_seed = 3 * seed;
  for (const flashjit::Argument& argument : arguments) {
    if (!has_argument(spec, argument)) continue;
    if (is_places(argument)) {
      const std::vector<std::int64_t> places = typical_places(argument, spec, shape);
      HostTensor tensor(DType::int64, argument.layout.sizes(spec, shape));
      std::memcpy(tensor.view().data, places.data(), tensor.bytes());
      work.add(argument, std::move(tensor));
      continue;
    }
    if (argument.role_in(spec) != Role::input) continue;
    std::vector<std::int64_t> sizes = argument.layout.sizes(spec, sized);
    const auto is_one_of = [&](std::initializer_list<TensorMember> members) {
      return std::find(members.begin(), members.end(), argument.tensor()) != members.end();
    };
    using Args = AttentionArgs;
    const bool is_cache = is_one_of({&Args::k, &Args::v, &Args::k_from, &Args::v_from});
    const bool is_scale = is_one_of({&Args::k_scale, &Args::v_scale});
    if (spec.paged && (is_cache || (is_scale && spec.kv_scale == KvScale::token_head)))
      sizes[0] = num_pages(data);
    HostTensor tensor(argument.dtype(spec), sizes);
    // Stored values and scales whose products are like the numbers of other dtypes.
    const float stored = spec.kv_dtype == DType::int8 ? 32 : 1;
    if (is_scale) {
      auto* const scales = static_cast<float*>(tensor.view().data);
      std::fill(scales, scales + tensor.bytes() / sizeof(float), 1 / stored);
      work.add(argument, std::move(tensor));
      continue;
    }
    verify::RandomOptions own_numbers = numbers;
    if (is_cache) own_numbers.scale *= stored;
    const bool computed = argument.tensor() == &AttentionArgs::o || argument.tensor() == &AttentionArgs::lse;
    if (is_cache && spec.kv_dtype == DType::fp8_ds_mla)
      verify::fill_random_ds_mla(tensor.view(), own_seed++, own_numbers);
    else if (!computed)
      verify::fill_random(tensor.view(), own_seed++, own_numbers);
    work.add(argument, std::move(tensor));
  }
  // Lists of the spec's other masks are made of them, below.
  const bool lists_masks =
      !info_of(spec.op).makes_lists && std::any_of(spec.mask.begin(), spec.mask.end(), is_of_masks);
  const TensorMember lists[] = {&AttentionArgs::block_offsets, &AttentionArgs::block_indices,
                                &AttentionArgs::block_bitmask_of, &AttentionArgs::block_bitmasks};
  std::erase_if(data.tables, [&](const MaskTable& table) {
    return lists_masks && std::find(std::begin(lists), std::end(lists), table.argument) != std::end(lists);
  });
  data.fit_lengths(spec, sized, work.host_args_);
  for (MaskTable& table : data.tables) {
    HostTensor tensor(DType::int32, table.shape);
    std::memcpy(tensor.view().data, table.values.data(), tensor.bytes());
    work.add(argument_of(table.argument), std::move(tensor));
  }
  data.set_sizes(work.host_args_);
  work.add_named(masks.named);
  for (const TensorMember list : lists)
    if (lists_masks)
      work.add(argument_of(list), HostTensor(DType::int32, argument_of(list).layout.sizes(spec, sized)));
  work.finish();
  if (lists_masks) verify::fill_block_lists(spec, work.host_args_);
  return work;
}

void Workload::compute_forward() {
  if (info_of(spec_.op).after) verify::fill_forward(spec_, host_args_);
}

void Workload::compute_forward(Engine& engine) {
  const std::optional<Operation> before = info_of(spec_.op).after;
  if (!before) return;
  AttentionSpec forward = spec_.for_op(*before);
  forward.lse = true;
  forward.deterministic = false;
  forward = forward.validated();
  AttentionArgs args = device_args_;
  std::vector<NamedArgument> named(args.named.begin(), args.named.end());
  std::erase_if(named, [&](const NamedArgument& one) {
    return std::any_of(spec_.tables.begin(), spec_.tables.end(),
                       [&](const DeclaredTable& table) { return is_gradient_name(one.name, table); });
  });
  args.named = named;
  for (const flashjit::Argument& argument : arguments)
    if (argument.tensor() && (!has_argument(forward, argument) || argument.role == Role::workspace))
      (args.*argument.tensor()).reset();
  engine.get(forward, shape_).launch(args);
  if (!context_) return;
  cuda::synchronize(*context_);
  for (Placed& tensor : tensors_)
    if (tensor.argument &&
        (tensor.argument->tensor() == &AttentionArgs::o || tensor.argument->tensor() == &AttentionArgs::lse))
      tensor.device.copy_to(tensor.host.view().data, tensor.host.bytes());
  cuda::synchronize(*context_);
}

Workload Workload::read(const AttentionSpec& spec, const TensorFiles& files, const MaskOptions& masks) {
  Workload work(spec);
  const auto lacks = [&](TensorMember starts) {
    return has_argument(spec, argument_of(starts)) && files[starts].empty();
  };
  if (lacks(&AttentionArgs::cu_seqlens_q) || lacks(&AttentionArgs::cu_seqlens_k)) {
    throw Error(ErrorCode::invalid_argument,
                std::string("the spec is varlen: its tensors are packed, and --cu-seqlens-q") +
                    (key_layout(spec) == KeyLayout::packed ? " and --cu-seqlens-k" : "") +
                    " must say where each sequence starts");
  }
  for (const flashjit::Argument& argument : arguments)
    if (!files[argument].empty()) work.add(argument, read_tensor(files[argument], argument, spec));
  const ArgumentSet required = arguments_of(spec).required;
  for (const flashjit::Argument& argument : arguments)
    if (argument.role_in(spec) == Role::input && (required & bit_of(argument)) && files[argument].empty())
      throw Error(ErrorCode::invalid_argument, std::string(argument.name) + " is missing: op " +
                                                   to_string(spec.op) + " takes it, " +
                                                   argument.layout_of(spec));
  work.host_args_.window_left = masks.window_left;
  work.host_args_.window_right = masks.window_right;
  work.host_args_.num_sinks = masks.num_sinks;
  work.shape_ = work.shape_of_inputs();
  work.add_named(masks.named);
  work.finish();
  return work;
}

Shape Workload::shape_of_inputs() const {
  const AttentionArgs& args = host_args_;
  const auto size = [](const Tensor& t, int from_end) {
    return static_cast<int>(t.shape[t.rank - from_end]);
  };
  const Tensor& rows = *(args.*rows_of(spec_.op).tensor());
  const Tensor& keys = args.k ? *args.k : rows;
  const bool paged = key_layout(spec_) == KeyLayout::paged;
  if (paged && !args.k)
    throw Error(ErrorCode::invalid_argument,
                "k is missing: the caches say how many pages there are and of what size; "
                "what generate writes for the same spec would work");
  Shape shape{.batch = spec_.varlen ? 1 : size(rows, 4),
              .seqlen_q = size(rows, 3),
              .seqlen_k = size(keys, 3),
              .num_heads_q = size(args.q ? *args.q : rows, 2),
              .num_heads_kv = size(keys, 2),
              .page_size = paged ? size(keys, 3) : 0};
  if (args.cu_seqlens_q) {
    shape.batch = static_cast<int>(std::max<std::int64_t>(args.cu_seqlens_q->shape[0] - 1, 0));
    shape.seqlen_q = longest_of(*args.cu_seqlens_q);
    if (args.cu_seqlens_k) shape.seqlen_k = longest_of(*args.cu_seqlens_k);
  }
  std::int64_t places = shape.seqlen_k;
  if (paged)
    places *= args.page_table ? args.page_table->shape[1] : keys.shape[0];
  else if (info_of(spec_.op).caches == When::always && !args.k)
    places = places_written(args, shape);
  require_length(places);
  shape.seqlen_k = static_cast<int>(places);
  return shape;
}

void Workload::add(const flashjit::Argument& argument, HostTensor tensor, bool output) {
  tensors_.push_back({std::move(tensor), {}, &argument, argument.name, output, argument.written_in(spec_)});
  host_args_.*argument.tensor() = tensors_.back().host.view();
}

void Workload::add_named(const std::vector<std::string>& given) {
  Shape sized = shape_;
  if (spec_.varlen && host_args_.q) sized.total_q = host_args_.q->shape[0];
  if (key_layout(spec_) == KeyLayout::packed && host_args_.k) sized.total_k = host_args_.k->shape[0];
  NamedValues values = named_values(spec_, sized, given);
  host_named_ = std::move(values.scalars);
  for (auto& [name, tensor] : values.tables) {
    host_named_.emplace_back(name, tensor.view());
    const auto declared = static_cast<std::size_t>(find_declared(spec_.tables, name));
    const Tensor view = tensor.view();
    tensors_.push_back({std::move(tensor), {}, nullptr, name});
    if (!spec_.tables[declared].grad) continue;
    const std::string& gradient = *gradient_names_.emplace_back(
        std::make_unique<const std::string>(gradient_name(spec_.tables[declared])));
    HostTensor made(DType::fp32, {view.shape.begin(), view.shape.begin() + view.rank});
    host_named_.emplace_back(gradient, made.view());
    tensors_.push_back(
        {std::move(made), {}, nullptr, gradient, true, true, std::move(values.gradient_files[declared])});
  }
  host_args_.named = host_named_;
}

// Adds the outputs.
void Workload::finish() {
  Shape sized = shape_;
  if (spec_.varlen && host_args_.q) sized.total_q = host_args_.q->shape[0];
  if (key_layout(spec_) == KeyLayout::packed && host_args_.k) sized.total_k = host_args_.k->shape[0];
  for (const flashjit::Argument& argument : arguments)
    if (argument.role_in(spec_) == Role::output && has_argument(spec_, argument) &&
        !(host_args_.*argument.tensor()))
      add(argument, HostTensor(argument.dtype(spec_), argument.layout.sizes(spec_, sized)), true);
  if (host_args_.cu_seqlens_q && has_argument(spec_, argument_of(&AttentionArgs::max_seqlen_q))) {
    host_args_.max_seqlen_q = shape_.seqlen_q;
    if (host_args_.cu_seqlens_k) host_args_.max_seqlen_k = shape_.seqlen_k;
  }
  device_args_ = host_args_;
  set_dropout({});
}

void Workload::set_dropout(const DropoutOptions& options) {
  if (!spec_.dropout) return;
  for (AttentionArgs* args : {&host_args_, &device_args_}) {
    args->dropout_p = options.p.value_or(0.1);
    args->dropout_seed = options.seed.value_or(1);
    args->dropout_offset = options.offset;
  }
}

void Workload::place(Device device) {
  for (Placed& tensor : tensors_) tensor.device = {};
  device_args_ = host_args_;
  context_.reset();
  if (device.kind == Device::Kind::cpu) return;
  context_ = std::make_unique<cuda::Context>(device.index);
  device_named_ = host_named_;
  for (Placed& tensor : tensors_) {
    Tensor view = tensor.host.view();
    tensor.device = cuda::DeviceBuffer(*context_, tensor.host.bytes());
    if (!tensor.output) tensor.device.copy_from(view.data, tensor.host.bytes());
    view.data = tensor.device.data();
    view.device = device;
    if (tensor.argument) {
      device_args_.*tensor.argument->tensor() = view;
    } else {
      for (NamedArgument& named : device_named_)
        if (named.name == tensor.name) named.value = view;
    }
  }
  device_args_.named = device_named_;
  cuda::synchronize(*context_);
}

void Workload::put_heads_first() {
  if (!is_cached(spec_)) return;
  for (AttentionArgs* const args : {&host_args_, &device_args_})
    for (std::optional<Tensor>* const member : {&args->k, &args->v}) {
      Tensor& t = **member;
      const std::int64_t seqlen = t.shape[1], heads = t.shape[2], head_dim = t.shape[3];
      t.strides = {heads * seqlen * head_dim, head_dim, seqlen * head_dim, 1};
    }
}

const AttentionArgs& Workload::args_for(const Kernel& kernel) {
  const auto words = static_cast<std::int64_t>((kernel.workspace_bytes(shape_) + 3) / 4);
  std::optional<Tensor>& workspace = device_args_.workspace;
  if (words == 0 || (workspace && workspace->shape[0] >= words)) return device_args_;
  HostTensor made(DType::int32, {words});
  std::memset(made.view().data, 0xff, made.bytes());  // NaN to a kernel that reads what it has not written
  workspace = made.view();
  if (context_) {
    workspaces_.emplace_back(*context_, made.bytes()).fill(0xff);
    cuda::synchronize(*context_);  // launches may take other streams
    workspace->data = workspaces_.back().data();
    workspace->device = {Device::Kind::cuda, context_->index()};
  } else {
    host_workspaces_.push_back(std::move(made));
  }
  return device_args_;
}

void Workload::poison() {
  for (Placed& tensor : tensors_) {
    if (!tensor.output) continue;
    if (context_) {
      tensor.device.fill(0xff);
    } else {
      std::memset(tensor.host.view().data, 0xff, tensor.host.bytes());
    }
  }
}

void Workload::fetch() {
  if (!context_) return;
  cuda::synchronize(*context_);
  for (Placed& tensor : tensors_) {
    if (tensor.written) tensor.device.copy_to(tensor.host.view().data, tensor.host.bytes());
  }
  cuda::synchronize(*context_);
}

void Workload::write_outputs(const TensorFiles& files) const {
  for (const Placed& tensor : tensors_) {
    if (!tensor.written) continue;
    const std::string& file = tensor.argument ? files[*tensor.argument] : tensor.file;
    if (!file.empty()) verify::write_npy(file, tensor.host.view());
  }
}

namespace {

// The rows of all heads.
double num_rows(const Tensor& t) {
  double rows = 1;
  for (int i = 0; i + 1 < t.rank; ++i) rows *= static_cast<double>(t.shape[i]);
  return rows;
}

// The pairs of rows and keys, of each head that has block lists of its own.
double listed_pairs(const AttentionSpec& spec, const AttentionArgs& args) {
  const Tensor &q = *args.q, &k = *args.k, &lists = *args.block_offsets;
  const double pairs = static_cast<double>(lists.shape[0] * lists.shape[1]) *
                       static_cast<double>(q.shape[q.rank - 3]) * static_cast<double>(k.shape[k.rank - 3]);
  return spec.varlen ? pairs / static_cast<double>(std::max<std::int64_t>(lists.shape[0], 1)) : pairs;
}

}  // namespace

std::int64_t Workload::query_rows() const {
  const Tensor& t = *(host_args_.*rows_of(spec_.op).tensor());
  std::int64_t rows = 1;
  for (int from_end = 2; from_end <= (spec_.varlen ? 3 : 4); ++from_end) rows *= t.shape[t.rank - from_end];
  return rows;
}

double customary_flops(const AttentionSpec& spec, const AttentionArgs& args) {
  const CustomaryFlops& count = info_of(spec.op).flops;
  double flops = 0;
  if (count.per_column > 0)
    flops += count.per_column * (spec.head_dim + spec.head_dim_v) * verify::kept_pairs(spec, args);
  if (count.per_element > 0) {
    const Tensor& t = *(args.*rows_of(spec.op).tensor());
    flops += count.per_element * num_rows(t) * static_cast<double>(t.shape[t.rank - 1]);
  }
  if (count.per_rotated > 0 && spec.rotary)
    flops += count.per_rotated * spec.rotary->columns(spec.head_dim) *
             (num_rows(*args.k_new) + (args.q ? num_rows(*args.q) : 0));
  if (count.per_pair > 0) flops += count.per_pair * listed_pairs(spec, args);
  return flops;
}

// The bytes of a key and its value in the caches of a key/value head, and of their scales.
double bytes_of_cached_row(const AttentionSpec& spec) {
  const auto element = static_cast<double>(size_of(spec.kv_dtype.value_or(spec.dtype)));
  const double scales = spec.kv_scale == KvScale::token_head ? (spec.v_in_k ? 1 : 2) * sizeof(float) : 0;
  return spec.cached_columns() * element + scales;
}

double bytes_of_keys(const AttentionSpec& spec, const AttentionArgs& args) {
  return verify::read_keys(spec, args) * bytes_of_cached_row(spec);
}

double moved_bytes(const AttentionSpec& spec, const AttentionArgs& args) {
  return 2 * num_rows(*args.k_from) * bytes_of_cached_row(spec);
}

double appended_bytes(const AttentionSpec& spec, const AttentionArgs& args) {
  const auto element = static_cast<double>(size_of(spec.dtype));
  const double of_new_row = (spec.head_dim + (spec.v_in_k ? 0 : spec.head_dim_v)) * element;
  return num_rows(*args.k_new) * (of_new_row + bytes_of_cached_row(spec)) +
         (args.q ? 2 * num_rows(*args.q) * spec.head_dim * element : 0);
}

std::pair<std::int64_t, std::int64_t> Workload::bytes_in_and_out() const {
  std::pair<std::int64_t, std::int64_t> bytes;
  for (const Placed& tensor : tensors_)
    (tensor.output ? bytes.second : bytes.first) += static_cast<std::int64_t>(tensor.host.bytes());
  return bytes;
}

double Workload::bound_bytes() const {
  switch (info_of(spec_.op).traffic) {
    case Traffic::none:
      return 0;
    case Traffic::reads_cache:
      return bytes_of_keys(spec_, host_args_);
    case Traffic::copies_rows:
      return appended_bytes(spec_, host_args_);
    case Traffic::moves_rows:
      return moved_bytes(spec_, host_args_);
  }
  return 0;
}

double Workload::flops() const {
  return customary_flops(spec_, host_args_);
}

void Workload::write_inputs(const std::string& folder) const {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) {
    throw Error(ErrorCode::invalid_argument, "folder '" + folder + "' cannot be made: " + failed.message());
  }
  for (const Placed& tensor : tensors_) {
    if (tensor.output) {
      if (!tensor.argument || !is_read(spec_, *tensor.argument)) continue;
      std::memset(tensor.host.view().data, 0, tensor.host.bytes());  // an empty cache
    }
    verify::write_npy(folder + "/" + std::string(tensor.name) + ".npy", tensor.host.view());
  }
}

}  // namespace flashjit::command
