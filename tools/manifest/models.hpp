// Well-known models: the sizes that attention kernels need.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

struct Model {
  std::string_view name;
  int head_dim, head_dim_v;
  bool causal;
  bool has_cache;             // of keys and values as attention reads them
  std::vector<Shape> shapes;  // typical shapes of a forward
  std::string_view source;    // where the figures come from: repository on huggingface.co, file
};

std::span<const Model> models();

// What kernels of a model are for.
struct ModelUse {
  Operation op = Operation::forward;
  // Of caches, in op decode and append_kv; absent: the dtype of q.
  std::optional<DType> kv_dtype = {};
  std::optional<KvScale> kv_scale = {};
};

// The model's specs for a use: bf16 and fp16, with fixed lengths and varlen. A forward and a decode come with
// and without log-sum-exp. A decode reads contiguous caches, or pages, and only these with varlen; an
// append_kv writes into either, and rotates K and Q. Throws invalid_argument for a decode or an append_kv of
// a model that has no cache.
std::vector<AttentionSpec> specs_of(const Model& model, const ModelUse& use);

// Typical shapes of an operation.
std::vector<Shape> shapes_of(const Model& model, Operation op);

}  // namespace flashjit
