// Well-known models: the sizes that attention kernels need.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// A model's cache of keys and values.
struct CachedHead {
  int head_dim = 0, head_dim_v = 0;  // 0: there is none
  bool v_in_k = false;  // a latent cache, of one key head; its columns from head_dim_v on are rotated
};

struct Model {
  std::string_view name;
  int head_dim, head_dim_v;
  bool causal;
  CachedHead cached;
  std::vector<Shape> shapes;  // typical shapes of a forward
  std::string_view source;    // where the figures come from: repository on huggingface.co, file
};

std::span<const Model> models();

// A use of a model's kernels: one operation.
struct ModelUse {
  Operation op = Operation::forward;
  // The dtype of caches, in op decode, append_kv, copy_kv and a forward with pages; absent: that of q.
  std::optional<DType> kv_dtype = {};
  std::optional<KvScale> kv_scale = {};
  bool pages = false;   // a forward reads its keys from pages, as prompts of a server do
  bool causal = true;   // where the model is; a decode of one row needs no mask
  bool rotated = true;  // an append_kv rotates K and Q
  bool tree = false;    // rows are draft tokens of a tree
  // The use's name names no caches, and a target may lack kernels for these.
  bool optional = false;
};

// The uses that have names: "train", "serve". `caches` are those of a server; empty: those of q's dtype, and
// fp8_e4m3 with each kind of scale, of latent caches with one.
enum class Purpose { train, serve };
inline constexpr std::string_view purposes[] = {"train", "serve"};
struct ModelCache {
  std::optional<DType> dtype = {};
  std::optional<KvScale> scale = {};
};
std::vector<ModelUse> uses_for(const Model& model, Purpose purpose, std::vector<ModelCache> caches,
                               bool tree);

// The model's specs for a use: bf16 and fp16, with fixed lengths and varlen. A forward and a decode come with
// and without log-sum-exp. A decode reads contiguous caches, or pages, and only these with varlen; an
// append_kv writes into either, and one copy_kv serves both. Throws invalid_argument for an operation on
// caches of a model that has none.
std::vector<AttentionSpec> specs_of(const Model& model, const ModelUse& use);

// Typical shapes of a use.
std::vector<Shape> shapes_of(const Model& model, const ModelUse& use);

}  // namespace flashjit
