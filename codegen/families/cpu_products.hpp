// The matrix products that a CPU kernel is made of, and the memory that they need.
#pragma once

#include <algorithm>

#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "shared/backward_cpu_params.h"
#include "shared/layout.h"

namespace flashjit {

// The forward and the backward multiply bf16 by AMX; other dtypes and operations use vector instructions on
// every target.
inline bool uses_amx(const AttentionSpec& spec, const Target& target) {
  const OperationInfo& op = info_of(spec.op);
  return target.amx && op.attends && !op.few_rows && spec.dtype == DType::bf16;
}

// The backward multiplies bf16 also by vectors, where the target can. Operands lie as they do for AMX.
inline bool multiplies_bf16(const AttentionSpec& spec, const Target& target) {
  return uses_amx(spec, target) ||
         (target.avx512_bf16 && spec.op == Operation::backward && spec.dtype == DType::bf16);
}

// Whether the kernel's products keep the tiles of one operand in registers.
inline bool keeps_amx_tiles(const AttentionSpec& spec, const Target& target) {
  return uses_amx(spec, target) && device::amx_keeps(spec.head_dim, spec.head_dim_v);
}

// How many keys a kernel processes at once. A tile's keys are divided into parts at multiples of this number.
inline int cpu_step(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!uses_amx(spec, target)) return config.block_n;
  const int keys = device::round_up(config.block_n, device::amx_unit);
  return keeps_amx_tiles(spec, target) ? std::min(keys, device::amx_kept_keys) : keys;
}

// Bytes of one packed block of K and V.
inline int cpu_packed_block(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto bytes = uses_amx(spec, target) ? device::amx_packed_block : device::cpu_packed_block;
  return bytes(spec.head_dim, spec.head_dim_v, config.block_n);
}

// Bytes of scratch that one thread lends to the kernel, with room for one packed block.
inline int cpu_scratch(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto bytes = uses_amx(spec, target) ? device::amx_forward_scratch : device::cpu_forward_scratch;
  return bytes(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n, spec.dropout) +
         cpu_packed_block(spec, target, config);
}
inline int cpu_backward_scratch(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto bytes =
      multiplies_bf16(spec, target) ? device::bf16_backward_scratch : device::cpu_backward_scratch;
  return bytes(spec.head_dim, spec.head_dim_v, config.block_n, !spec.score.empty());
}

}  // namespace flashjit
