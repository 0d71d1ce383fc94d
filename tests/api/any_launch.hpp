// A valid launch of any spec, made from the table of arguments: every argument that the spec has is given.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "codegen/spec/declarations.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// Specs that have every tensor of the table between them, each with the arguments that exclude one another.
struct AnySpec {
  const char* json;
  std::vector<TensorMember> without{};  // of those that the spec allows
};
inline const std::vector<AnySpec>& any_specs() {
  using Args = AttentionArgs;
  static const std::vector<AnySpec> specs = {
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "mask": ["padding", {"kind": "sliding_window", "sinks": true}, {"kind": "block_sparse", "block_m": 32, "block_n": 32}],
           "score": ["score * slope[head] + 0.3"], "tables": {"slope": {"dtype": "fp32", "shape": ["heads_q"]}}})"},
      {R"({"op": "backward", "dtype": "fp32", "head_dim": 16, "varlen": true, "mask": ["padding", "tree"], "dropout": true, "sink_logits": true,
           "score": ["score + bias[head, key]"], "tables": {"bias": {"dtype": "fp32", "shape": ["heads_q", "seqlen_k"], "grad": true}}})"},
      {R"({"op": "backward", "dtype": "bf16", "head_dim": 16, "offsets": true, "mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 32}]})"},
      {R"({"op": "decode", "dtype": "bf16", "head_dim": 32, "paged": true, "append": true, "kv_dtype": "int8", "kv_scale": "token_head",
           "rotary": {"q": true, "tables": "fp32"}})"},
      {R"({"op": "append_kv", "dtype": "fp32", "head_dim": 16, "rotary": {"q": true}})",
       {&Args::append_positions}},
      {R"({"op": "append_kv", "dtype": "bf16", "head_dim": 16, "varlen": true, "paged": true})",
       {&Args::slots}},
      {R"({"op": "merge", "dtype": "fp32", "head_dim": 16})"},
      {R"({"op": "make_block_lists", "dtype": "bf16", "head_dim": 16, "varlen": true,
           "mask": [{"kind": "block_sparse", "block_m": 32, "block_n": 32, "of_masks": true}, "causal"]})"},
      {R"({"op": "copy_kv", "dtype": "bf16", "head_dim": 16, "kv_dtype": "int8", "kv_scale": "token_head"})"},
      {R"({"op": "forward", "dtype": "bf16", "head_dim": 16, "gathered": true, "mask": ["causal"]})"},
  };
  return specs;
}

class AnyLaunch {
 public:
  // Inputs hold numbers between -1 and 1, tables of indices zeros, and lengths of packed sequences `shape`'s.
  AnyLaunch(const AnySpec& of, const Shape& shape, Engine& engine)
      : spec(AttentionSpec::from_json(of.json)), kernel(engine.get(spec, shape)) {
    const ArgumentSet allowed = arguments_of(spec).allowed;
    for (const Argument& argument : flashjit::arguments) {
      const TensorMember member = argument.tensor();
      if (!(allowed & bit_of(argument)) || std::ranges::count(of.without, member)) continue;
      if (!member || argument.role == Role::workspace) continue;
      std::vector<std::int64_t> sizes;
      if (argument.layout.sizes) sizes = argument.layout.sizes(spec, shape);
      if (member == &AttentionArgs::tree_bits) sizes = {1, shape.seqlen_q, 1};
      if (member == &AttentionArgs::arrived) sizes = {1};
      const bool given = argument.role_in(spec) == Role::input && !argument.written_in(spec);
      const Tensor t = make(argument.dtype(spec), sizes, given);
      if (member == &AttentionArgs::arrived) *static_cast<std::int32_t*>(t.data) = 1;
      for (int b = 0; b <= shape.batch; ++b) {
        if (member == &AttentionArgs::cu_seqlens_q)
          static_cast<std::int32_t*>(t.data)[b] = b * shape.seqlen_q;
        if (member == &AttentionArgs::cu_seqlens_k)
          static_cast<std::int32_t*>(t.data)[b] = b * shape.seqlen_k;
      }
      args.*member = t;
    }
    if (allowed & bit_of(argument_of(&AttentionArgs::max_seqlen_q))) args.max_seqlen_q = shape.seqlen_q;
    if (allowed & bit_of(argument_of(&AttentionArgs::max_seqlen_k))) args.max_seqlen_k = shape.seqlen_k;
    if (spec.dropout) args.dropout_p = 0.25;
    for (const DeclaredTable& table : spec.tables) {
      std::vector<std::int64_t> sizes;
      for (const TableDimension& dim : table.shape) sizes.push_back(size_in(shape, dim).value_or(1));
      named.push_back({table.name, make(table.dtype, sizes, true)});
      if (!table.grad) continue;
      names_.push_back(std::make_unique<std::string>(gradient_name(table)));
      named.push_back({*names_.back(), make(DType::fp32, sizes, false)});
    }
    args.named = named;
    if (const auto bytes = static_cast<std::int64_t>(kernel.workspace_bytes(shape)))
      args.workspace = make(DType::uint8, {bytes}, false);
  }

  // Every tensor of the launch with its name.
  struct Given {
    std::string name;
    Tensor* tensor;
    bool written;
  };
  std::vector<Given> tensors() {
    std::vector<Given> all;
    for (const Argument& argument : flashjit::arguments)
      if (const TensorMember member = argument.tensor(); member && args.*member)
        all.push_back(
            {argument.name, &*(args.*member), argument.written_in(spec) || argument.role == Role::workspace});
    for (NamedArgument& argument : named)
      all.push_back({std::string(argument.name), &std::get<Tensor>(argument.value),
                     argument.name.starts_with(gradient_prefix)});
    return all;
  }
  // The bytes of everything that a launch has written.
  std::string written() {
    std::string bytes;
    for (const Given& given : tensors())
      if (given.written && given.tensor != &*args.workspace)
        bytes.append(static_cast<const char*>(given.tensor->data), bytes_of(*given.tensor));
    return bytes;
  }

  static std::size_t bytes_of(const Tensor& t) {
    std::size_t bytes = size_of(t.dtype);
    for (int i = 0; i < t.rank; ++i) bytes *= static_cast<std::size_t>(t.shape[i]);
    return bytes;
  }

  const AttentionSpec spec;
  const Kernel& kernel;
  AttentionArgs args;
  std::vector<NamedArgument> named;

 private:
  Tensor make(DType dtype, const std::vector<std::int64_t>& sizes, bool input) {
    Tensor t = Tensor::contiguous(nullptr, dtype, {}, sizes);
    const std::size_t bytes = bytes_of(t);
    // Rounded up: workspaces are aligned to 64 bytes.
    memory_.emplace_back(std::aligned_alloc(64, bytes / 64 * 64 + 128), &std::free);
    t.data = memory_.back().get();
    std::memset(t.data, 0, bytes);
    for (std::size_t i = 0; input && i < bytes / size_of(dtype); ++i) {
      // Exact, so that no floating-point exception is raised.
      const int number = static_cast<int>(i * 37 % 101) - 50;
      const float value = static_cast<float>(number) * 0x1p-6f;
      if (dtype == DType::fp32)
        static_cast<float*>(t.data)[i] = value;
      else if (dtype == DType::bf16)
        static_cast<std::uint16_t*>(t.data)[i] =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
      else if (dtype == DType::int8)
        static_cast<std::int8_t*>(t.data)[i] = static_cast<std::int8_t>(number);
    }
    return t;
  }

  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
  std::vector<std::unique_ptr<std::string>> names_;
};

}  // namespace flashjit
