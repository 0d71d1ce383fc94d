#include "tools/command/workload.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <utility>

#include "tools/verify/mask.hpp"
#include "tools/verify/npy.hpp"

namespace flashjit::command {
namespace {

void require_length(int length) {
  if (length <= longest_sequence) return;
  throw Error(ErrorCode::invalid_argument, "a sequence of " + std::to_string(length) +
                                               " tokens was asked for, " + std::to_string(longest_sequence) +
                                               " are the most");
}

// Starts of `batch` packed sequences: the first is as long as allowed, the others between a quarter of that
// and all.
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

int longest_of(const Tensor& starts) {
  const auto* at = static_cast<const std::int32_t*>(starts.data);
  std::int32_t longest = 0;
  for (std::int64_t b = 0; b + 1 < starts.shape[0]; ++b) longest = std::max(longest, at[b + 1] - at[b]);
  return longest;
}

HostTensor read_tensor(const std::string& path, const char* name, DType dtype, int rank) {
  const verify::NpyArray array = verify::read_npy(path);
  if (static_cast<int>(array.shape.size()) != rank) {
    throw Error(ErrorCode::invalid_argument, path + ": " + name + " has " +
                                                 std::to_string(array.shape.size()) +
                                                 " dimensions, expected " + std::to_string(rank));
  }
  const std::vector<std::byte> elements = verify::elements_as(array, dtype);
  HostTensor tensor(dtype, array.shape);
  std::memcpy(tensor.view().data, elements.data(), elements.size());
  return tensor;
}

std::string name_of(std::optional<Tensor> AttentionArgs::* argument) {
  if (argument == &AttentionArgs::q) return "q";
  if (argument == &AttentionArgs::k) return "k";
  if (argument == &AttentionArgs::v) return "v";
  if (argument == &AttentionArgs::cu_seqlens_q) return "cu_seqlens_q";
  if (argument == &AttentionArgs::cu_seqlens_k) return "cu_seqlens_k";
  if (argument == &AttentionArgs::o) return "o";
  return argument == &AttentionArgs::lse ? "lse" : verify::name_of(argument);
}

}  // namespace

HostTensor::HostTensor(DType dtype, std::vector<std::int64_t> shape) {
  const auto elements = product_of(shape);
  if (!elements || *elements >> 56 != 0) throw std::bad_alloc();  // beyond any address
  bytes_ = static_cast<std::size_t>(*elements) * size_of(dtype);
  memory_.reset(std::aligned_alloc(64, (bytes_ + 64) / 64 * 64));
  if (!memory_) throw std::bad_alloc();
  view_ = {.data = memory_.get(), .dtype = dtype, .device = {}, .rank = static_cast<int>(shape.size())};
  std::int64_t stride = 1;
  for (int i = view_.rank - 1; i >= 0; --i) {
    view_.shape[i] = shape[i];
    view_.strides[i] = stride;
    stride *= shape[i];
  }
}

void HostTensor::Free::operator()(void* p) const {
  std::free(p);
}

Workload Workload::generate(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                            const MaskOptions& masks, const verify::RandomOptions& numbers) {
  require_length(shape.seqlen_q);
  require_length(shape.seqlen_k);
  Workload work(spec);
  work.shape_ = shape;
  std::vector<std::int64_t> rows_q = {shape.batch, shape.seqlen_q}, rows_k = {shape.batch, shape.seqlen_k};
  if (spec.varlen) {
    HostTensor starts_q = random_lengths(shape.batch, shape.seqlen_q, seed);
    HostTensor starts_k = random_lengths(shape.batch, shape.seqlen_k, seed + 1);
    rows_q = {static_cast<const std::int32_t*>(starts_q.view().data)[shape.batch]};
    rows_k = {static_cast<const std::int32_t*>(starts_k.view().data)[shape.batch]};
    work.add(&AttentionArgs::cu_seqlens_q, std::move(starts_q));
    work.add(&AttentionArgs::cu_seqlens_k, std::move(starts_k));
  }
  const auto random = [&](std::vector<std::int64_t> rows, int heads, int dim, std::uint64_t own_seed) {
    rows.insert(rows.end(), {heads, dim});
    HostTensor tensor(spec.dtype, std::move(rows));
    verify::fill_random(tensor.view(), own_seed, numbers);
    return tensor;
  };
  work.add(&AttentionArgs::q, random(rows_q, shape.num_heads_q, spec.head_dim, 3 * seed));
  work.add(&AttentionArgs::k, random(rows_k, shape.num_heads_kv, spec.head_dim, 3 * seed + 1));
  work.add(&AttentionArgs::v, random(rows_k, shape.num_heads_kv, spec.head_dim_v, 3 * seed + 2));
  verify::MaskData data = masks.generate(spec, shape, seed);
  for (MaskTable& table : data.tables) {
    HostTensor tensor(DType::int32, table.shape);
    std::memcpy(tensor.view().data, table.values.data(), tensor.bytes());
    work.add(table.argument, std::move(tensor));
  }
  data.set_sizes(work.host_args_);
  work.finish();
  return work;
}

Workload Workload::read(const AttentionSpec& spec, const TensorFiles& files, const MaskOptions& masks) {
  Workload work(spec);
  if (spec.varlen) {
    if (files.cu_seqlens_q.empty() || files.cu_seqlens_k.empty()) {
      throw Error(
          ErrorCode::invalid_argument,
          "the spec is varlen: its tensors are packed, and --cu-seqlens-q and --cu-seqlens-k must say where "
          "each sequence starts");
    }
    work.add(&AttentionArgs::cu_seqlens_q, read_tensor(files.cu_seqlens_q, "cu_seqlens_q", DType::int32, 1));
    work.add(&AttentionArgs::cu_seqlens_k, read_tensor(files.cu_seqlens_k, "cu_seqlens_k", DType::int32, 1));
  }
  const int rank = spec.varlen ? 3 : 4;
  work.add(&AttentionArgs::q, read_tensor(files.q, "q", spec.dtype, rank));
  work.add(&AttentionArgs::k, read_tensor(files.k, "k", spec.dtype, rank));
  work.add(&AttentionArgs::v, read_tensor(files.v, "v", spec.dtype, rank));
  for (std::size_t i = 0; i < std::size(verify::mask_table_arguments); ++i) {
    const verify::TableArgument& table = verify::mask_table_arguments[i];
    if (files.tables[i].empty()) continue;
    work.add(table.argument, read_tensor(files.tables[i], table.name, DType::int32, table.rank));
  }
  work.host_args_.window_left = masks.window_left;
  work.host_args_.window_right = masks.window_right;
  work.host_args_.num_sinks = masks.num_sinks.value_or(0);
  const Tensor& q = *work.host_args_.q;
  const Tensor& k = *work.host_args_.k;
  work.shape_.num_heads_q = static_cast<int>(q.shape[rank - 2]);
  work.shape_.num_heads_kv = static_cast<int>(k.shape[rank - 2]);
  if (spec.varlen) {
    work.shape_.batch =
        static_cast<int>(std::max<std::int64_t>(work.host_args_.cu_seqlens_q->shape[0] - 1, 0));
    work.shape_.seqlen_q = longest_of(*work.host_args_.cu_seqlens_q);
    work.shape_.seqlen_k = longest_of(*work.host_args_.cu_seqlens_k);
  } else {
    work.shape_.batch = static_cast<int>(q.shape[0]);
    work.shape_.seqlen_q = static_cast<int>(q.shape[1]);
    work.shape_.seqlen_k = static_cast<int>(k.shape[1]);
  }
  work.finish();
  return work;
}

void Workload::add(std::optional<Tensor> AttentionArgs::* argument, HostTensor tensor, bool output) {
  tensors_.push_back({std::move(tensor), {}, argument, output});
  host_args_.*argument = tensors_.back().host.view();
}

// Adds the outputs.
void Workload::finish() {
  const Tensor& q = *host_args_.q;
  std::vector<std::int64_t> o(q.shape.begin(), q.shape.begin() + q.rank - 1);
  o.push_back(spec_.head_dim_v);
  add(&AttentionArgs::o, HostTensor(spec_.dtype, std::move(o)), true);
  if (spec_.lse) {
    add(&AttentionArgs::lse,
        spec_.varlen ? HostTensor(DType::fp32, {q.shape[1], q.shape[0]})
                     : HostTensor(DType::fp32, {q.shape[0], q.shape[2], q.shape[1]}),
        true);
  }
  if (spec_.varlen) {
    host_args_.max_seqlen_q = shape_.seqlen_q;
    host_args_.max_seqlen_k = shape_.seqlen_k;
  }
  device_args_ = host_args_;
  set_dropout({});
}

void Workload::set_dropout(const DropoutOptions& options) {
  if (!spec_.dropout) return;
  for (AttentionArgs* args : {&host_args_, &device_args_}) {
    args->dropout_p = options.p.value_or(0.1);
    args->dropout_seed = options.seed.value_or(1);
    args->dropout_offset = options.offset.value_or(0);
  }
}

void Workload::place(Device device) {
  for (Placed& tensor : tensors_) tensor.device = {};
  device_args_ = host_args_;
  context_.reset();
  if (device.kind == Device::Kind::cpu) return;
  context_ = std::make_unique<cuda::Context>(device.index);
  for (Placed& tensor : tensors_) {
    Tensor view = tensor.host.view();
    tensor.device = cuda::DeviceBuffer(*context_, tensor.host.bytes());
    if (!tensor.output) tensor.device.copy_from(view.data, tensor.host.bytes());
    view.data = tensor.device.data();
    view.device = device;
    device_args_.*tensor.argument = view;
  }
  cuda::synchronize(*context_);
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
    if (tensor.output) tensor.device.copy_to(tensor.host.view().data, tensor.host.bytes());
  }
  cuda::synchronize(*context_);
}

std::int64_t Workload::query_rows() const {
  const Tensor& q = *host_args_.q;
  std::int64_t rows = 1;
  for (int i = 0; i + 1 < q.rank; ++i) rows *= q.shape[i];
  return rows;
}

double Workload::flops() const {
  return 2.0 * (spec_.head_dim + spec_.head_dim_v) * verify::kept_pairs(spec_, host_args_);
}

void Workload::write_inputs(const std::string& folder) const {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) {
    throw Error(ErrorCode::invalid_argument, "folder '" + folder + "' cannot be made: " + failed.message());
  }
  for (const Placed& tensor : tensors_) {
    if (!tensor.output)
      verify::write_npy(folder + "/" + name_of(tensor.argument) + ".npy", tensor.host.view());
  }
}

}  // namespace flashjit::command
