// The GPU decode by mma.sync, for the families of decode that have its kernels.
#pragma once

#include "codegen/families/kernel_family.hpp"

namespace flashjit::mma_decode {

inline constexpr std::string_view fields[] = {
    "head_dim_v",      "v_in_k",   "mask",     "lse",    "varlen",  "paged",       "deterministic",
    "batch_invariant", "o_dtype",  "score",    "tables", "scalars", "sink_logits", "precise",
    "config",          "kv_dtype", "kv_scale", "append", "rotary",  "offsets"};
inline constexpr auto masks = masks_without<PaddingMask, BlockSparseMask>;
// num_stages: buffers of K and V for each group of warps that works on keys of its own.
inline constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

// As those of a KernelFamily.
std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config);
ConfigAxes axes(const AttentionSpec& spec, const Target& target);
std::string futility(const AttentionSpec& spec, const Target& target, const KernelConfig& config);
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape);
void render(const AttentionSpec& spec, KernelSource& source);

// Both kernels of a decode, the second to merge, whose functions `kernel` names.
void render_kernel(const AttentionSpec& spec, const char* header, const char* kernel, KernelSource& source);

}  // namespace flashjit::mma_decode
