#include "tools/manifest/models.hpp"

#include <initializer_list>
#include <string>

#include "codegen/arguments/table.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

// A shape of one sequence that attends to itself.
std::vector<Shape> self_attention(int num_heads_q, int num_heads_kv, std::initializer_list<int> seqlens) {
  std::vector<Shape> shapes;
  for (const int n : seqlens) shapes.push_back({1, n, n, num_heads_q, num_heads_kv});
  return shapes;
}

// hidden_size, or channels, are num_heads * head_dim unless the file names head_dim.
std::vector<Model> make_models() {
  const auto prompts = [](int num_heads_q, int num_heads_kv) {
    return self_attention(num_heads_q, num_heads_kv, {512, 2048, 8192, 32768});
  };
  constexpr CachedHead none{}, of_128{128, 128}, latent{576, 512, true};
  return {
      // Language models; Llama 3 takes 8192 tokens.
      {"llama-3-8b", 128, 128, true, of_128, self_attention(32, 8, {512, 2048, 8192}),
       "meta-llama/Meta-Llama-3-8B: config.json"},
      {"llama-3-70b", 128, 128, true, of_128, self_attention(64, 8, {512, 2048, 8192}),
       "meta-llama/Meta-Llama-3-70B: config.json"},
      {"qwen2.5-7b", 128, 128, true, of_128, prompts(28, 4), "Qwen/Qwen2.5-7B: config.json"},
      {"qwen2.5-72b", 128, 128, true, of_128, prompts(64, 8), "Qwen/Qwen2.5-72B: config.json"},
      {"qwen3-8b", 128, 128, true, of_128, prompts(32, 8), "Qwen/Qwen3-8B: config.json"},
      {"qwen3-32b", 128, 128, true, of_128, prompts(64, 8), "Qwen/Qwen3-32B: config.json"},
      // The layers that see all keys; the others have heads of 256 and a window.
      {"gemma-4-31b-full", 512, 512, true, {512, 512}, prompts(32, 4), "google/gemma-4-31B: config.json"},
      // Prompts with keys and values expanded: qk_nope_head_dim + qk_rope_head_dim, v_head_dim; the cache is
      // of
      // latent vectors: kv_lora_rank 512 + qk_rope_head_dim 64.
      {"deepseek-v3", 192, 128, true, latent, prompts(128, 128), "deepseek-ai/DeepSeek-V3: config.json"},
      {"kimi-k2", 192, 128, true, latent, prompts(64, 64), "moonshotai/Kimi-K2-Instruct: config.json"},
      {"glm-5", 256, 256, true, latent, prompts(64, 64), "zai-org/GLM-5: config.json"},
      // Vision: 1152 over 16 heads; 27 x 27 and 16 x 16 patches.
      {"siglip-so400m-384", 72, 72, false, none, self_attention(16, 16, {729}),
       "google/siglip-so400m-patch14-384: config.json"},
      {"siglip-so400m-224", 72, 72, false, none, self_attention(16, 16, {256}),
       "google/siglip-so400m-patch14-224: config.json"},
      // Images of 1024 x 1024: 640 channels over 10 heads at 64 x 64, 1280 over 20 at 32 x 32, each also over
      // 77 tokens of text.
      {"sdxl",
       64,
       64,
       false,
       none,
       {{1, 4096, 4096, 10, 10}, {1, 1024, 1024, 20, 20}, {1, 4096, 77, 10, 10}, {1, 1024, 77, 20, 20}},
       "stabilityai/stable-diffusion-xl-base-1.0: unet/config.json"},
      // The same images in 64 x 64 tokens, after 512 of text.
      {"flux.1", 128, 128, false, none, self_attention(24, 24, {4608}),
       "black-forest-labs/FLUX.1-dev: transformer/config.json"},
  };
}

}  // namespace

std::span<const Model> models() {
  static const std::vector<Model> all = make_models();
  return all;
}

std::vector<ModelUse> uses_for(const Model& model, Purpose purpose, std::vector<ModelCache> caches,
                               bool tree) {
  if (purpose == Purpose::train) return {{.op = Operation::forward}, {.op = Operation::backward}};
  const bool chosen = !caches.empty();
  if (!chosen) {
    caches.emplace_back();
    for (const KvScale scale : kv_scales)
      if (!model.cached.v_in_k || scale == KvScale::tensor) caches.push_back({DType::fp8_e4m3, scale});
  }
  std::vector<ModelUse> uses = {{.op = Operation::forward}};
  for (const ModelCache& cache : caches) {
    const ModelUse of{
        .kv_dtype = cache.dtype, .kv_scale = cache.scale, .optional = !chosen && cache.dtype.has_value()};
    const auto add = [&](Operation op, auto change) {
      ModelUse use = of;
      use.op = op;
      change(use);
      uses.push_back(use);
    };
    add(Operation::forward, [](ModelUse& use) { use.pages = true; });
    for (const bool causal : {true, false})
      add(Operation::decode, [&](ModelUse& use) { use.causal = causal; });
    for (const bool rotated : {true, false})
      add(Operation::append_kv, [&](ModelUse& use) { use.rotated = rotated; });
    add(Operation::copy_kv, [](ModelUse&) {});
    if (tree) add(Operation::decode, [](ModelUse& use) { use.tree = true; });
  }
  return uses;
}

std::vector<AttentionSpec> specs_of(const Model& model, const ModelUse& use) {
  const OperationInfo& op = info_of(use.op);
  const bool of_cache = op.caches == When::always || use.pages;
  // Other operations read lse, or have none.
  const AttentionSpec any{.op = use.op};
  const Argument& lse_argument = argument_of(&AttentionArgs::lse);
  const bool writes_lse = has_argument(any, lse_argument) && lse_argument.role_in(any) == Role::output;
  if (of_cache && !model.cached.head_dim) {
    std::string known;
    for (const Model& other : models())
      if (other.cached.head_dim) known += (known.empty() ? "" : ", ") + std::string(other.name);
    throw Error(ErrorCode::invalid_argument, std::string(model.name) +
                                                 " keeps no cache of keys and values, so it has no " +
                                                 op.name + "; these do: " + known);
  }
  std::vector<AttentionSpec> specs;
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const bool paged : {false, true})
      for (const bool varlen : {false, true})
        for (const bool lse : {false, true}) {
          if ((paged && !of_cache) || (!paged && use.pages)) continue;
          if (op.few_rows && varlen && !paged) continue;
          if (op.copies && (varlen || paged)) continue;  // one kernel for all caches
          if (!writes_lse && !lse) continue;
          AttentionSpec spec{.op = use.op,
                             .dtype = dtype,
                             .head_dim = of_cache ? model.cached.head_dim : model.head_dim,
                             .head_dim_v = of_cache ? model.cached.head_dim_v : model.head_dim_v,
                             .v_in_k = of_cache && model.cached.v_in_k};
          spec.varlen = varlen;
          spec.paged = paged;
          spec.lse = lse;
          if (op.appends == When::always && use.rotated)
            spec.rotary =
                spec.v_in_k
                    ? Rotary{.style = RotaryStyle::interleaved, .first = model.cached.head_dim_v, .q = true}
                    : Rotary{.q = true};
          if (op.attends && use.tree)
            spec.mask = {TreeMask{}};
          else if (op.attends && model.causal && use.causal)
            spec.mask = {CausalMask{}};
          if (of_cache) {
            spec.kv_dtype = use.kv_dtype;
            if (use.kv_scale) spec.kv_scale = use.kv_scale;
          }
          specs.push_back(spec.validated());
        }
  return specs;
}

std::vector<Shape> shapes_of(const Model& model, const ModelUse& use) {
  std::vector<Shape> shapes = model.shapes;
  if (info_of(use.op).caches == When::always) {
    const Shape& longest = model.shapes.back();
    shapes.clear();
    for (const int batch : {1, 16, 64})
      shapes.push_back({batch, 1, longest.seqlen_k, longest.num_heads_q, longest.num_heads_kv, 16});
  } else if (!use.pages) {
    return shapes;
  }
  for (Shape& shape : shapes)
    if (model.cached.v_in_k) shape.num_heads_kv = 1, shape.page_size = 64;
  return shapes;
}

}  // namespace flashjit
