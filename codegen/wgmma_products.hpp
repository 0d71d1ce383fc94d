// The two matrix products of an sm_90a kernel, as text.
#pragma once

#include <string>

#include "config.hpp"
#include "spec.hpp"

namespace flashjit {

// struct WgmmaProducts, for Config::Products:
//   qk(float (&scores)[block_n / 2], q, u64 k)
//     scores = Q K^T. q: the operand's registers, u32[steps][4], or its descriptor; k: the block's
//     descriptor.
//   pv(float (&output)[head_dim_v / 2], const u32 (&weights)[block_n / 16][4], u64 v, int accumulate)
//     output (+)= weights V; overwrites where accumulate is 0.
// Rendered, because inline assembly neither loops nor counts operands; and a product is one statement: with
// one for each wgmma the optimizer of NVRTC drags its sums from each to the next.
std::string wgmma_products(const AttentionSpec& spec, const KernelConfig& config);

}  // namespace flashjit
