// The tensors of a launch as Hopper's copy engine (TMA) wants them described.
#pragma once

#include "codegen/config.hpp"
#include "codegen/spec.hpp"
#include "templates/shared/params.h"

namespace flashjit::cuda {

// 4-D [batch, heads, rows, dim] in boxes of one 64-element panel: a tile's rows of q, a block's of k and v.
// Packed tensors are one batch entry; a context must be current. What lies past a tensor's end reads as
// zeros. Throws invalid_argument for strides that the engine does not take.
void encode_tensor_maps(const AttentionSpec& spec, const KernelConfig& config,
                        const device::ForwardParams& params, device::ForwardMaps& maps);

}  // namespace flashjit::cuda
