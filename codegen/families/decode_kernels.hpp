// Which of two kernels a decode on sm_90a is.
#pragma once

#include <algorithm>

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/decode_cuda_layout.h"

namespace flashjit {

// Heads whose output one warp, or one warpgroup of 64 rows, has no registers for, or their keys.
inline bool has_wide_heads(const AttentionSpec& spec) {
  return std::max(spec.head_dim, spec.head_dim_v) > 256;
}

// Whether the config is one of the forward's kernel: of wide heads all are, of others those whose block_n
// says so. Such a kernel computes tiles of 64 rows and more by wgmma. The kernel of decode itself has blocks
// of 16 or 32 keys.
inline bool decodes_by_forward(const AttentionSpec& spec, const KernelConfig& config) {
  return has_wide_heads(spec) || config.block_n > 32;
}

inline device::LayoutKeys decode_keys(const AttentionSpec& spec) {
  return {spec.kv_dtype.has_value(), spec.kv_dtype && spec.kv_scale == KvScale::token_head};
}

}  // namespace flashjit
