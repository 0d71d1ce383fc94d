// The matrix products of an sm_90a kernel as text, and the layout that a backward's follow.
#pragma once

#include <string>

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/backward_sm90a_layout.h"

namespace flashjit {

// struct WgmmaProducts, the type Config::Products:
//   qk(float (&scores)[block_n / 2], q, u64 k)
//     scores = Q K^T. q: the operand's registers, u32[steps][4], or its descriptor;
//     k: the block's descriptor.
//   qk_rest(scores, q, k)
//     With K in two pieces and no Q in registers: qk leaves out the second piece, qk_rest adds it.
//     Where consumers alternate, either may come first: with an int, 0, that says so.
//   pv(float (&output)[head_dim_v / 2], const u32 (&weights)[block_n / 16][4], u64 v, int accumulate)
//     output += weights V, or output = weights V if accumulate is 0.
//   pv_rest, pv_given, pv_rest_given
//     The same of the second group's columns, and with a descriptor of weights in shared memory.
// The products are rendered because inline assembly neither loops nor counts operands. Each product is one
// asm statement: with a statement for each wgmma, NVRTC's optimizer copies the sums between statements.
std::string wgmma_products(const AttentionSpec& spec, const KernelConfig& config);

// Shared memory of a backward's thread blocks, and the sizes of its products: of those that make dK, which
// make dV as well unless others do, or of those that make `sums`.
device::Sm90aBackwardLayout backward_layout(const AttentionSpec& spec, const KernelConfig& config);
device::Sm90aBackwardLayout backward_layout(const AttentionSpec& spec, const KernelConfig& config,
                                            device::BackwardSums sums);
// struct BackwardProducts, the type Config::Products of a backward (cuda/backward_sm90a.cuh):
//   s(float (&)[score_rows / 2], u64 k, u64 q)                  S^T = K Q^T
//   dp(float (&)[tile_rows / 2], u64 v, u64 d_o)                dP^T = V dO^T
//   dv(float (&)[head_dim_v / 2], weights, u64 d_o, int)        dV += P^T dO, or = if the last is 0
//   dk(float (&)[head_dim / 2], ds, u64 q, int)                 dK += dS^T Q, likewise
//   dq(float (&)[dq_columns / 2], u64 ds, u64 k)                dQ = dS K
//   dq_last(float (&)[dq_last_columns / 2], u64 ds, u64 k)      the same for half of a last panel, if one is
//   left
// If dQ has a kernel of its own, struct DqProducts, the type Config::DqProducts (cuda/backward_sm90a_dq.cuh),
// instead of dq.
std::string backward_products(const AttentionSpec& spec, const KernelConfig& config);
// The same of wide heads (cuda/backward_sm90a_wide_parts.cuh), by chunks of 128 columns. `rest`: of the last
// columns, where there are fewer. a, b: descriptors. The last argument is 0 if the product is no addition.
//   s, s_rest, dp_rest(float (&)[16], u64 a, u64 b, int)          S or dP
//   s_own(float (&)[16], const u32 (&a)[8][4], u64 b, int)        the same of an operand in registers
//   dk, dk_rest(float (&)[columns / 2], const u32 (&a)[2][4], u64 b, int)  sums: dK and dQ, of 32 weights
//   dv, dv_rest(float (&)[columns / 2], const u32 (&a)[4][4], u64 b, int)  dV, of 64
std::string wide_backward_products(const AttentionSpec& spec);

}  // namespace flashjit
