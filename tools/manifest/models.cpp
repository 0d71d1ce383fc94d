#include "tools/manifest/models.hpp"

namespace flashjit {

std::span<const Model> models() {
  static const std::vector<int> text = {512, 2048, 8192, 32768};
  static const Model all[] = {
      // Language models: head_dim is hidden_size / num_attention_heads unless the file names it.
      {"llama-3-8b", 32, 8, 128, 128, true, {512, 2048, 8192}, "meta-llama/Meta-Llama-3-8B: config.json"},
      {"llama-3-70b", 64, 8, 128, 128, true, {512, 2048, 8192}, "meta-llama/Meta-Llama-3-70B: config.json"},
      {"qwen2.5-7b", 28, 4, 128, 128, true, text, "Qwen/Qwen2.5-7B: config.json"},
      {"qwen2.5-72b", 64, 8, 128, 128, true, text, "Qwen/Qwen2.5-72B: config.json"},
      {"qwen3-8b", 32, 8, 128, 128, true, text, "Qwen/Qwen3-8B: config.json"},
      {"qwen3-32b", 64, 8, 128, 128, true, text, "Qwen/Qwen3-32B: config.json"},
      // Prefill, with keys and values expanded: qk_nope_head_dim 128 + qk_rope_head_dim 64, v_head_dim 128.
      {"deepseek-v3", 128, 128, 192, 128, true, text, "deepseek-ai/DeepSeek-V3: config.json"},
      // Vision: hidden_size 1152 over 16 heads; 27 x 27 and 16 x 16 patches.
      {"siglip-so400m-384", 16, 16, 72, 72, false, {729}, "google/siglip-so400m-patch14-384: config.json"},
      {"siglip-so400m-224", 16, 16, 72, 72, false, {256}, "google/siglip-so400m-patch14-224: config.json"},
      // Images of 1024 x 1024: 640 channels over 10 heads at 64 x 64, 1280 over 20 at 32 x 32.
      {"sdxl",
       20,
       20,
       64,
       64,
       false,
       {1024, 4096},
       "stabilityai/stable-diffusion-xl-base-1.0: unet/config.json"},
      // The same in 64 x 64 tokens, after 512 of text.
      {"flux.1", 24, 24, 128, 128, false, {4608}, "black-forest-labs/FLUX.1-dev: transformer/config.json"},
  };
  return all;
}

std::vector<AttentionSpec> specs_of(const Model& model) {
  std::vector<AttentionSpec> specs;
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    for (const bool varlen : {false, true}) {
      for (const bool lse : {false, true}) {
        AttentionSpec spec{.dtype = dtype, .head_dim = model.head_dim, .head_dim_v = model.head_dim_v};
        if (model.causal) spec.mask = {CausalMask{}};
        spec.varlen = varlen;
        spec.lse = lse;
        specs.push_back(spec.validated());
      }
    }
  }
  return specs;
}

}  // namespace flashjit
