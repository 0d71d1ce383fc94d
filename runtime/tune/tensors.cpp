#include "runtime/tune/tensors.hpp"

#include <unistd.h>
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "codegen/spec/declarations.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/thread_pool.hpp"
#include "runtime/tune/mask_tables.hpp"
#include "runtime/tune/named_tables.hpp"
#include "templates/shared/ds_mla.h"

namespace flashjit {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

 private:
  std::uint64_t state_;
};

// The bits of n / 64 for n = -128 ... 127, which all dtypes of 16 and 32 bits hold exactly. Of int8 n itself,
// of an 8-bit float every number below 2 in size.
template <class Bits>
std::array<Bits, 256> element_table(DType dtype) {
  std::array<Bits, 256> table;
  for (int i = 0; i < 256; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(i - 128) / 64);
    std::uint32_t element = bits;
    if (dtype == DType::bf16) element = bits >> 16;
    // The sign, the exponent with bias 15 instead of 127, and ten bits of the fraction.
    if (dtype == DType::fp16)
      element = i == 128 ? 0 : (bits >> 16 & 0x8000) | ((bits >> 13 & 0x3ffff) - (112 << 10));
    if (dtype == DType::int8) element = static_cast<std::uint32_t>(i - 128);
    if (dtype == DType::fp8_e4m3 || dtype == DType::fp8_e5m2) element = i & 0xbf;
    table[i] = static_cast<Bits>(element);
  }
  return table;
}

template <class Bits>
std::vector<char> random_elements(DType dtype, std::size_t count, std::uint64_t seed) {
  const std::array<Bits, 256> table = element_table<Bits>(dtype);
  std::vector<char> bytes(count * sizeof(Bits));
  Random random(seed);
  for (std::size_t i = 0; i < count; i += 8) {
    std::uint64_t bits = random();
    for (std::size_t j = i; j < std::min(count, i + 8); ++j, bits >>= 8) {
      std::memcpy(bytes.data() + j * sizeof(Bits), &table[bits & 0xff], sizeof(Bits));
    }
  }
  return bytes;
}

std::vector<char> random_elements(DType dtype, std::size_t count, std::uint64_t seed) {
  switch (size_of(dtype)) {
    case 4:
      return random_elements<std::uint32_t>(dtype, count, seed);
    case 2:
      return random_elements<std::uint16_t>(dtype, count, seed);
    default:
      return random_elements<std::uint8_t>(dtype, count, seed);
  }
}

std::vector<char> repeated(float value, std::size_t count) {
  std::vector<char> bytes(count * sizeof value);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  return bytes;
}

// Keys of a cache of fp8_ds_mla, with scales of 1.
std::vector<char> random_ds_mla(std::size_t bytes, std::uint64_t seed) {
  using device::DsMla;
  std::vector<char> keys = random_elements(DType::fp8_e4m3, bytes, seed);
  const std::vector<char> scales = repeated(1, DsMla::groups),
                          rotary = random_elements(DType::bf16, bytes / DsMla::bytes * DsMla::rotary_columns,
                                                   seed);
  for (std::size_t key = 0; key < bytes / DsMla::bytes; ++key) {
    char* const at = keys.data() + key * DsMla::bytes;
    std::memcpy(at + DsMla::scales, scales.data(), scales.size());
    constexpr std::size_t size = DsMla::rotary_columns * 2;
    std::memcpy(at + DsMla::rotary, rotary.data() + key * size, size);
  }
  return keys;
}

// A backward's lse, as scores of such q and k give it where a row sees all keys: their variance is near 16
// / 9. Weights of another lse need not fit fp16.
std::vector<char> typical_lse(std::size_t count, int seqlen_k) {
  return repeated(std::log(static_cast<float>(seqlen_k)) + 8.0f / 9, count);
}

bool is_kv_scale(const Argument& argument) {
  return argument.tensor() == &AttentionArgs::k_scale || argument.tensor() == &AttentionArgs::v_scale;
}

struct Caches {
  std::size_t last_level, memory;  // bytes of the last-level cache, and bytes that we may take
};

Caches caches_of(Device device, const cuda::Context* context) {
  if (context) return {cuda_device(device.index).l2_cache, cuda::free_memory(*context) / 2};
  // The bounds keep start-up short on machines with very large
  // caches, and where a machine's share of them is unknown.
  const long size = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  const auto cache = static_cast<std::size_t>(std::clamp(size, 8L << 20, 64L << 20));
  const auto pages = static_cast<std::size_t>(std::max(::sysconf(_SC_AVPHYS_PAGES), 0L));
  return {cache, pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) / 2};
}

float element(DType dtype, const char* at) {
  if (dtype == DType::fp32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  if (dtype == DType::bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  // fp16: scaling by 2^112 corrects the exponent's bias, also for numbers below 2^-14.
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16, rest = std::uint32_t{bits & 0x7fffu} << 13;
  const bool special = (bits & 0x7c00) == 0x7c00;
  const float magnitude =
      special ? std::bit_cast<float>(rest | 0x7f800000u) : std::bit_cast<float>(rest) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

}  // namespace

TuneTensors::Buffer TuneTensors::allocate(std::size_t bytes) {
  Buffer buffer;
  buffer.bytes = bytes;
  if (context_) {
    buffer.device = cuda::DeviceBuffer(*context_, bytes);
  } else {
    buffer.host = {static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)), std::free};
    if (!buffer.host) throw std::bad_alloc();
  }
  return buffer;
}

void TuneTensors::write(Buffer& buffer, const void* from) {
  if (context_) {
    buffer.device.copy_from(from, buffer.bytes);
    cuda::synchronize(*context_);
  } else {
    std::memcpy(buffer.host.get(), from, buffer.bytes);
  }
}

TuneTensors::TuneTensors(const AttentionSpec& spec, const Shape& shape, Device device) : device_(device) {
  if (shape.batch < 1 || shape.seqlen_q < 1 || shape.seqlen_k < 1 || shape.num_heads_q < 1 ||
      shape.num_heads_kv < 1 || shape.num_heads_q % shape.num_heads_kv != 0) {
    throw Error(ErrorCode::invalid_argument,
                "there is nothing to measure at batch " + std::to_string(shape.batch) + ", seqlen " +
                    std::to_string(shape.seqlen_q) + " x " + std::to_string(shape.seqlen_k) + ", heads " +
                    std::to_string(shape.num_heads_q) + " over " + std::to_string(shape.num_heads_kv) +
                    ": sizes of at least 1, and query heads that are a multiple of key heads, would work");
  }
  for (const int length : {shape.seqlen_q, shape.seqlen_k})
    if (length > longest_sequence)
      refuse_argument("seqlen ", length, " is longer than any sequence, which has at most ", longest_sequence,
                      " rows");
  const auto elements = product_of({shape.batch, std::max(shape.seqlen_q, shape.seqlen_k), shape.num_heads_q,
                                    std::max(spec.head_dim, spec.head_dim_v)});
  if (!elements || *elements >> 56 != 0) throw std::bad_alloc();  // beyond any address space
  if (device.kind == Device::Kind::cuda) context_ = std::make_unique<cuda::Context>(device.index);

  const MaskTables tables = typical_tables(spec, shape);
  const Shape sized = with_totals(shape, tables);
  struct Part {
    const Argument* argument;  // null: a table of the spec's own
    const char* name;
    Tensor view;
    std::vector<char> values{};  // empty for an output
  };
  std::vector<Part> parts;
  std::uint64_t seed = 3;
  for (const Argument& argument : arguments) {
    if (!argument.tensor() || !has_argument(spec, argument)) continue;
    if (argument.role_in(spec) == Role::input || argument.role_in(spec) == Role::output) {
      const Tensor view =
          Tensor::contiguous(nullptr, argument.dtype(spec), device, argument.layout.sizes(spec, sized));
      parts.push_back({&argument, argument.name, view});
      const auto count = static_cast<std::size_t>(view.shape[0] * view.strides[0]);
      if (argument.role_in(spec) == Role::input)
        parts.back().values = argument.tensor() == &AttentionArgs::lse ? typical_lse(count, shape.seqlen_k)
                              : is_kv_scale(argument)
                                  ? repeated(spec.kv_dtype == DType::int8 ? 1.0f / 64 : 1.0f, count)
                              : argument.tensor() == &AttentionArgs::k && spec.kv_dtype == DType::fp8_ds_mla
                                  ? random_ds_mla(count, seed++)
                                  : random_elements(view.dtype, count, seed++);
      continue;
    }
    if (is_places(argument)) {
      const std::vector<std::int64_t> places = typical_places(argument, spec, shape);
      const auto* bytes = reinterpret_cast<const char*>(places.data());
      parts.push_back({&argument, argument.name,
                       Tensor::contiguous(nullptr, DType::int64, device, argument.layout.sizes(spec, shape)),
                       std::vector<char>(bytes, bytes + places.size() * sizeof(std::int64_t))});
      continue;
    }
    const auto table = std::find_if(tables.begin(), tables.end(),
                                    [&](const MaskTable& t) { return t.argument == argument.tensor(); });
    if (table == tables.end()) continue;
    const auto* bytes = reinterpret_cast<const char*>(table->values.data());
    parts.push_back({&argument, argument.name, table->view(nullptr, device),
                     std::vector<char>(bytes, bytes + table->values.size() * sizeof(std::int32_t))});
  }
  for (TypicalTable& table : typical_named_tables(spec, sized)) {
    parts.push_back({nullptr, table.declared->name.c_str(),
                     Tensor::contiguous(nullptr, table.declared->dtype, device, table.shape),
                     std::move(table.elements)});
    if (!table.declared->grad) continue;
    const std::string& name =
        *gradient_names_.emplace_back(std::make_unique<const std::string>(gradient_name(*table.declared)));
    parts.push_back({nullptr, name.c_str(), Tensor::contiguous(nullptr, DType::fp32, device, table.shape)});
  }

  std::size_t inputs = 0, all = 0;
  const auto bytes_of = [](const Part& part) {
    return static_cast<std::size_t>(part.view.shape[0] * part.view.strides[0]) * size_of(part.view.dtype);
  };
  for (const Part& part : parts) {
    all += bytes_of(part);
    inputs += part.values.size();
  }
  const Caches caches = caches_of(device, context_.get());
  const std::size_t wanted = std::min<std::size_t>((2 * caches.last_level + inputs - 1) / inputs, 64);
  const std::size_t count = std::max<std::size_t>(1, std::min(wanted, caches.memory / all));
  for (std::size_t i = 0; i < count; ++i) {
    AttentionArgs args;
    std::vector<NamedArgument>& named = named_.emplace_back();
    for (const DeclaredScalar& scalar : spec.scalars)
      named.emplace_back(scalar.name, typical_scalar(scalar, sized));
    for (const Part& part : parts) {
      Buffer buffer = allocate(bytes_of(part));
      if (!part.values.empty()) write(buffer, part.values.data());
      Tensor view = part.view;
      view.data = buffer.data();
      if (!part.argument) {
        named.emplace_back(part.name, view);
        if (i == 0 && part.values.empty()) outputs_.push_back({nullptr, buffers_.size(), part.name});
      } else {
        args.*part.argument->tensor() = view;
        if (i == 0 && part.argument->role_in(spec) == Role::output)
          outputs_.push_back({part.argument, buffers_.size(), nullptr});
      }
      buffers_.push_back(std::move(buffer));
    }
    args.named = named;
    set_typical_numbers(spec, shape, args);
    sets_.push_back(args);
  }
}

AttentionArgs TuneTensors::with_workspace(const AttentionArgs& set, std::size_t bytes) {
  const auto words = static_cast<std::int64_t>((bytes + 3) / 4);
  if (words > 0 && (!workspace_ || workspace_->shape[0] < words)) {
    buffers_.push_back(allocate(static_cast<std::size_t>(words) * 4));
    workspace_ = Tensor{.data = buffers_.back().data(), .dtype = DType::int32, .device = device_, .rank = 1};
    workspace_->shape[0] = words;
    workspace_->strides[0] = 1;
  }
  AttentionArgs args = set;
  if (words > 0) args.workspace = workspace_;
  return args;
}

void TuneTensors::poison() {
  for (const OutputBuffer& output : outputs_) {
    Buffer& buffer = buffers_[output.index];
    if (context_) {
      buffer.device.fill(0xff);
    } else {
      std::memset(buffer.host.get(), 0xff, buffer.bytes);
    }
  }
  if (context_) cuda::synchronize(*context_);
}

std::vector<TuneTensors::Output> TuneTensors::fetch() {
  if (context_) cuda::synchronize(*context_);
  std::vector<Output> outputs;
  for (const OutputBuffer& output : outputs_) {
    const Buffer& buffer = buffers_[output.index];
    std::vector<char>& bytes =
        outputs.emplace_back(output.argument, std::vector<char>(buffer.bytes), output.name).elements;
    if (context_) {
      buffer.device.copy_to(bytes.data(), bytes.size());
      cuda::synchronize(*context_);
    } else {
      std::memcpy(bytes.data(), buffer.host.get(), bytes.size());
    }
  }
  return outputs;
}

namespace {

std::string described(const char* name, std::size_t row, double off, double bound) {
  return std::string(name) + " differs from the heuristic config's by " + std::to_string(off) + " in row " +
         std::to_string(row) + ", where rounding explains " + std::to_string(bound);
}

// The rows' difference. `inputs` is the spec's dtype, to which
// weights are rounded even if the output has another dtype.
std::string difference_of_rows(const char* name, DType dtype, DType inputs, std::size_t dim,
                               const std::vector<char>& output, const std::vector<char>& expected,
                               bool partly_written) {
  const std::size_t size = size_of(dtype);
  const double unit = inputs == DType::bf16 ? 0x1p-8 : inputs == DType::fp16 ? 0x1p-11 : 0x1p-24;
  const double tolerance = 16 * (unit + 0x1p-12);
  const auto difference_in_rows = [&](std::size_t first, std::size_t last) -> std::string {
    for (std::size_t row = first; row < last; ++row) {
      const char* a = output.data() + row * dim * size;
      const char* b = expected.data() + row * dim * size;
      // Poison that nobody wrote over. What is quantised has equal bits.
      if (partly_written && std::memcmp(a, b, dim * size) == 0) continue;
      if (size == 1) return described(name, row, 1, 0);
      double off = 0, norm = 0;
      for (std::size_t i = 0; i < dim; ++i) {
        const double x = element(dtype, a + i * size), y = element(dtype, b + i * size);
        off += (x - y) * (x - y);
        norm += y * y;
      }
      // The comparison is false for NaN, too.
      if (!(std::sqrt(off) <= tolerance * std::sqrt(norm)))
        return described(name, row, std::sqrt(off), tolerance * std::sqrt(norm));
    }
    return {};
  };
  const std::size_t rows = expected.size() / (dim * size);
  // One thread for each 2^18 elements, which take a millisecond.
  const std::size_t chunks =
      std::clamp<std::size_t>(rows * dim >> 18, 1, static_cast<std::size_t>(available_cpus()));
  std::vector<std::string> differences(chunks);
  {
    std::vector<std::jthread> threads;
    for (std::size_t c = 0; c < chunks; ++c) {
      threads.emplace_back(
          [&, c] { differences[c] = difference_in_rows(rows * c / chunks, rows * (c + 1) / chunks); });
    }
  }
  for (std::string& difference : differences) {
    if (!difference.empty()) return std::move(difference);
  }
  return {};
}

std::string difference_of_logarithms(const char* name, const std::vector<char>& output,
                                     const std::vector<char>& expected) {
  for (std::size_t row = 0; row < expected.size() / sizeof(float); ++row) {
    const float a = element(DType::fp32, output.data() + row * sizeof(float));
    const float b = element(DType::fp32, expected.data() + row * sizeof(float));
    const double bound = 0x1p-9 + 0x1p-20 * std::fabs(b);
    if (a != b && !(std::fabs(a - b) <= bound)) return described(name, row, std::fabs(a - b), bound);
  }
  return {};
}

}  // namespace

std::string output_difference(const AttentionSpec& spec, const std::vector<TuneTensors::Output>& outputs,
                              const std::vector<TuneTensors::Output>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const std::vector<char>&a = outputs[i].elements, &b = expected[i].elements;
    if (!expected[i].argument) {
      for (std::size_t at = 0; at < a.size(); at += sizeof(float))
        if (!std::isfinite(element(DType::fp32, a.data() + at)))
          return std::string(expected[i].name) + " has an element that is no number";
      continue;
    }
    const Argument& argument = *expected[i].argument;
    // The size of sink logits is not known here.
    const auto dim = static_cast<std::size_t>(
        argument.layout.of_scales ? 1 : std::max<std::int64_t>(argument.layout.sizes(spec, {}).back(), 1));
    std::string difference = argument.tensor() == &AttentionArgs::lse
                                 ? difference_of_logarithms(argument.name, a, b)
                                 : difference_of_rows(argument.name, argument.dtype(spec), spec.dtype, dim, a,
                                                      b, argument.written_by != 0);
    if (!difference.empty()) return difference;
  }
  return {};
}

}  // namespace flashjit
