// Which of two kernels a decode on sm_90a is.
#pragma once

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/decode_cuda_layout.h"

namespace flashjit {

// Whether the config is one of the forward's kernel, by its block_n. Such a kernel computes tiles of 64 rows
// and more by wgmma and divides no keys. The kernel of decode itself has blocks of 16 or 32 keys.
inline bool decodes_by_forward(const KernelConfig& config) {
  return config.block_n > 32;
}

inline device::LayoutKeys decode_keys(const AttentionSpec& spec) {
  return {spec.kv_dtype.has_value(), spec.kv_dtype && spec.kv_scale == KvScale::token_head};
}

}  // namespace flashjit
