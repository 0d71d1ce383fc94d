// Which of three kernels a decode on sm_90a is.
#pragma once

#include <algorithm>

#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/decode_cuda_layout.h"
#include "shared/decode_cuda_params.h"

namespace flashjit {

// Heads whose output one warp, or one warpgroup of 64 rows, has no registers for, or their keys.
inline bool has_wide_heads(const AttentionSpec& spec) {
  return std::max(spec.head_dim, spec.head_dim_v) > 256;
}

// 8-bit latent caches whose keys sm_90a's kernel of the forward converts. It copies rows of a multiple of 16
// bytes. With scales of each key a tile would have to hold values times scales, and keys without.
inline bool converts_latents(const AttentionSpec& spec) {
  return spec.kv_dtype && spec.paged && spec.v_in_k && has_wide_heads(spec) &&
         spec.key_elements() % 16 == 0 && spec.kv_scale != KvScale::token_head;
}

// Whether sm_90a's kernel of the forward computes the decode: why not, else empty. Its varlen packs K and V,
// too, if they have no pages.
inline const char* why_no_forward(const AttentionSpec& spec) {
  if (spec.batch_invariant)
    return "batch_invariant has parts of keys at fixed places, and the forward's kernel none";
  if (spec.kv_dtype && !converts_latents(spec))
    return "the forward's kernel reads keys and values of the spec's dtype only";
  if (spec.varlen && !spec.paged) return "the forward's kernel takes packed rows only with a paged cache";
  return "";
}

// 8-bit latent caches for whose decode sm_90a has a kernel of tiles of 16 query rows, with keys as rows of
// the products (templates/cuda/decode_latents.cuh). Scales of each key would have to be in the weights.
inline bool has_keys_as_rows(const AttentionSpec& spec) {
  return spec.kv_dtype && spec.v_in_k && spec.head_dim_v > 256 && spec.head_dim_v % 64 == 0 &&
         spec.head_dim % 64 == 0 && spec.kv_scale != KvScale::token_head && !spec.batch_invariant;
}
// Its blocks are larger than those of the kernel by mma.sync, its tiles smaller than those of the forward's.
inline bool decodes_by_keys_as_rows(const AttentionSpec& spec, const Target& target,
                                    const KernelConfig& config) {
  return target.has(Instructions::wgmma) && has_keys_as_rows(spec) && config.block_m == 16 &&
         config.block_n > 32;
}

// Whether the config is one of the forward's kernel: of wide heads all are that it computes, but for 8-bit
// keys that both kernels compute: there block_m says so. Of others it is those whose block_n says so. Such a
// kernel computes tiles of 64 rows and more by wgmma. The kernel of decode itself has blocks of 16 or 32
// keys.
inline bool decodes_by_forward(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!target.has(Instructions::wgmma)) return false;
  if (!has_wide_heads(spec)) return config.block_n > 32;
  if (decodes_by_keys_as_rows(spec, target, config)) return false;
  return *why_no_forward(spec) == 0 && (!spec.has_kv_scales() || config.block_m >= 64);
}

inline device::LayoutKeys decode_keys(const AttentionSpec& spec) {
  return {spec.kv_dtype.has_value(), spec.kv_dtype && spec.kv_scale == KvScale::token_head, spec.v_in_k,
          spec.kv_dtype == DType::fp8_ds_mla ? ds_mla_bytes : 0};
}
inline int decode_streams(const AttentionSpec& spec) {
  return device::decode_streams(spec.head_dim_v, spec.kv_dtype.has_value());
}
inline device::CudaDecodeLayout cuda_decode_layout(const AttentionSpec& spec, const KernelConfig& config) {
  return {spec.head_dim,     spec.head_dim_v,  config.block_m,   config.block_n,
          config.num_stages, config.num_warps, decode_keys(spec)};
}

}  // namespace flashjit
