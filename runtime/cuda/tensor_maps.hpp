// The tensors of a launch as Hopper's copy engine (TMA) wants them described.
#pragma once

#include <array>

#include "codegen/config.hpp"
#include "codegen/spec.hpp"
#include "templates/shared/forward_sm90a_params.h"

namespace flashjit::cuda {

// The elements of a tensor, and the box of them that one copy takes; the contiguous dimension comes first.
struct TensorMapShape {
  std::array<unsigned long long, 4> sizes;
  std::array<unsigned long long, 3> strides;  // bytes, of all but the first
  std::array<unsigned, 4> box;
};

// 4-D [batch, heads, rows, dim] in boxes of one 64-element panel: a tile's rows of q, a block's of k and v.
// Where heads are packed q is [batch, rows, heads, dim], so that a box holds a token's heads together. Packed
// tensors are one batch entry.
struct TensorMapShapes {
  TensorMapShape q, k, v;
};
TensorMapShapes tensor_map_shapes(const AttentionSpec& spec, const KernelConfig& config,
                                  const device::Sm90aForwardParams& params);

// A context must be current. What lies past a tensor's
// end reads as zeros. Throws invalid_argument for strides that the engine does not take.
void encode_tensor_maps(const AttentionSpec& spec, const KernelConfig& config,
                        const device::Sm90aForwardParams& params, device::ForwardMaps& maps);

}  // namespace flashjit::cuda
