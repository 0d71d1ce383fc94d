// Which of two kernels a forward on sm_90a is.
#pragma once

#include "codegen/families/decode_kernels.hpp"

namespace flashjit {

// Whether it is the one by mma.sync, which converts all 8-bit keys. The other kernel converts latent ones of
// wide heads, and keys and values of up to 256 columns.
inline bool forwards_by_mma(const AttentionSpec& spec, const Target& target) {
  if (!target.has(Instructions::wgmma)) return true;
  return spec.kv_dtype && !converts_latents(spec) && (spec.v_in_k || has_wide_heads(spec));
}

}  // namespace flashjit
