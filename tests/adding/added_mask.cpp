// Compiled by added_mask.sh with the sources of a copy to which a worked example was applied: renders a spec
// with the new mask, and holds its kernel for CPUs to the oracle.
//   added_mask render SPEC TARGET
//       prints the kernel's text, with every header folded in
//   added_mask verify SPEC LIBRARY SAME
//       compares the kernel of SPEC, a forward in fp32, with the oracles of SPEC and of SAME; LIBRARY is the
//       kernel's text for x86-64-v3, compiled
//   added_mask refusal SPEC
//       prints the message of the error that SPEC gives
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codegen/embedded_headers.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "shared/forward_cpu_params.h"
#include "shared/layout.h"
#include "tools/verify/forward_oracle.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit {

// Read from the copy, whose root is the working directory.
std::span<const EmbeddedHeader> embedded_headers() {
  static const std::vector<std::pair<std::string, std::string>> files = [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (const auto& entry : std::filesystem::recursive_directory_iterator("templates")) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path());
      all.emplace_back(std::filesystem::relative(entry.path(), "templates").string(),
                       std::string(std::istreambuf_iterator<char>(file), {}));
    }
    return all;
  }();
  static const std::vector<EmbeddedHeader> headers = [] {
    std::vector<EmbeddedHeader> all;
    for (const auto& [name, text] : files) all.push_back({name, text});
    return all;
  }();
  return headers;
}

// Oracles of other operations are left out.
verify::Oracle verify::oracle_of(const AttentionSpec& spec, const AttentionArgs& args,
                                 const OracleOptions& options) {
  return forward_oracle(spec, args, options);
}

namespace {

const Target cpu = Target::parse("x86-64-v3");
constexpr int batch = 2, heads = 2;

KernelSource source_of(const AttentionSpec& spec, const Target& target) {
  const Shape shape{
      .batch = batch, .seqlen_q = 200, .seqlen_k = 200, .num_heads_q = heads, .num_heads_kv = heads};
  return render(spec, target, heuristic_config(spec, target, shape));
}

using Entry = void (*)(const device::CpuForwardParams*, long long begin, long long end, void* scratch);

// A dense tensor of random data.
struct Data {
  Data(std::initializer_list<std::int64_t> shape, std::uint64_t seed)
      : tensor{.dtype = DType::fp32, .rank = static_cast<int>(shape.size())} {
    std::copy(shape.begin(), shape.end(), tensor.shape.begin());
    std::int64_t size = 1;
    for (int i = tensor.rank; i-- > 0; size *= tensor.shape[i]) tensor.strides[i] = size;
    memory.resize(static_cast<std::size_t>(size));
    tensor.data = memory.data();
    verify::fill_random(tensor, seed);
  }
  // [batch, seqlen, heads, columns]
  device::TensorView view() {
    return {memory.data(), tensor.strides[0], tensor.strides[1], tensor.strides[2]};
  }
  std::vector<float> memory;
  Tensor tensor;
};

// Whether the kernel's results are right by both specs, and wrong for a spec without masks.
bool is_right(const AttentionSpec& spec, Entry entry, const AttentionSpec& same, int seqlen_q, int seqlen_k) {
  const KernelSource source = source_of(spec, cpu);
  Data q({batch, seqlen_q, heads, spec.head_dim}, 1), k({batch, seqlen_k, heads, spec.head_dim}, 2),
      v({batch, seqlen_k, heads, spec.head_dim_v}, 3), o({batch, seqlen_q, heads, spec.head_dim_v}, 4),
      lse({batch, heads, seqlen_q}, 5);

  AttentionArgs args;
  args.q = q.tensor;
  args.k = k.tensor;
  args.v = v.tensor;
  args.o = o.tensor;
  args.lse = lse.tensor;

  device::CpuForwardParams params{};
  params.batch = batch;
  params.num_heads_q = params.num_heads_kv = heads;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(spec.head_dim));
  params.q = q.view();
  params.k = k.view();
  params.v = v.view();
  params.o = o.view();
  params.lse = {lse.memory.data(), heads * seqlen_q, 1, seqlen_q};
  params.packed_heads = params.key_parts = 1;
  params.tile_rows = source.config.block_m;

  const std::size_t bytes = static_cast<std::size_t>(source.steps.at(0).scratch) / 64 * 64 + 64;
  const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, bytes), std::free);
  const device::PackedHead head{.head = -1, .blocks = 1};
  std::memcpy(scratch.get(), &head, sizeof head);
  entry(&params, 0, batch * heads * device::ceil_div(seqlen_q, params.tile_rows), scratch.get());

  AttentionSpec unmasked = spec;
  unmasked.mask.clear();
  const auto verdict = [&](const AttentionSpec& of) {
    const verify::Report report = verify::verify_outputs(of, args);
    std::printf("%d rows, %d keys, %s: %s\n", seqlen_q, seqlen_k, of.to_json().c_str(), report.str().c_str());
    return report.verdict();
  };
  using enum verify::Verdict;
  return verdict(spec) == right && verdict(same) == right && verdict(unmasked) == wrong;
}

int run(const std::vector<const char*>& arguments) {
  const std::string_view verb = arguments.at(0);
  const char* const json = arguments.at(1);
  if (verb == "refusal") {
    try {
      AttentionSpec::from_json(json);
    } catch (const Error& error) {
      std::puts(error.what());
      return 0;
    }
    return 1;
  }
  const AttentionSpec spec = AttentionSpec::from_json(json);
  if (verb == "render") {
    std::fputs(standalone(source_of(spec, Target::parse(arguments.at(2)))).c_str(), stdout);
    return 0;
  }
  void* const library = dlopen(arguments.at(2), RTLD_NOW);
  if (!library) throw std::runtime_error(dlerror());
  const AttentionSpec same = AttentionSpec::from_json(arguments.at(3));
  const auto entry = reinterpret_cast<Entry>(dlsym(library, "flashjit_forward"));
  bool all_right = true;
  // As many rows as keys, fewer, and more.
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{130, 130}, {70, 200}, {200, 70}})
    all_right &= is_right(spec, entry, same, seqlen_q, seqlen_k);
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace flashjit

int main(int count, char** arguments) {
  try {
    return flashjit::run({arguments + 1, arguments + count});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
