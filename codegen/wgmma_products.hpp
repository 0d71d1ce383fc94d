// The two matrix products of an sm_90a kernel, as text.
#pragma once

#include <string>

#include "config.hpp"
#include "spec.hpp"

namespace flashjit {

// struct WgmmaProducts, the type Config::Products:
//   qk(float (&scores)[block_n / 2], q, u64 k)
//     scores = Q K^T. q: the operand's registers, u32[steps][4], or its descriptor;
//     k: the block's descriptor.
//   pv(float (&output)[head_dim_v / 2], const u32 (&weights)[block_n / 16][4], u64 v, int accumulate)
//     output += weights V, or output = weights V if accumulate is 0.
// The products are rendered because inline assembly neither loops nor counts operands. Each product is one
// asm statement: with a statement for each wgmma, NVRTC's optimizer copies the sums between statements.
std::string wgmma_products(const AttentionSpec& spec, const KernelConfig& config);

}  // namespace flashjit
