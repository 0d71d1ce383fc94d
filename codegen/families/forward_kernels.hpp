// Which of two kernels a forward on sm_90a is.
#pragma once

#include "codegen/arguments/table.hpp"
#include "codegen/families/decode_kernels.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {

// Whether it is the one by mma.sync, which converts all 8-bit keys. The other kernel converts latent ones of
// wide heads, and keys and values of up to 256 columns.
inline bool forwards_by_mma(const AttentionSpec& spec, const Target& target) {
  if (!target.has(Instructions::wgmma)) return true;
  return spec.kv_dtype && !converts_latents(spec) && (spec.v_in_k || has_wide_heads(spec));
}

// Whether the one by wgmma divides keys by lengths that only the device knows
// (cuda/forward_sm90a_lengths.cuh).
inline bool divides_by_length(const AttentionSpec& spec) {
  return has_wide_heads(spec) && (is_cached(spec) || find_mask<PaddingMask>(spec.mask));
}

}  // namespace flashjit
