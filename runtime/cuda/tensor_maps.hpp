// Descriptions of a launch's tensors for Hopper's copy engine (TMA).
#pragma once

#include <array>

#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "templates/shared/backward_params.h"
#include "templates/shared/backward_sm90a_params.h"
#include "templates/shared/forward_sm90a_params.h"
#include "templates/shared/gathered_maps.h"

namespace flashjit::cuda {

// The sizes of a tensor, and the box of elements that one copy takes. The contiguous dimension comes first.
struct TensorMapShape {
  std::array<unsigned long long, 4> sizes;
  std::array<unsigned long long, 3> strides;  // bytes; of all dimensions but the first
  std::array<unsigned, 4> box;
};

// Tensors are [batch, heads, rows, dim], in boxes of one 64-element panel: a tile's rows
// of q, a block's keys of k and v. If heads are packed, q is [batch, rows, heads, dim],
// so that a box holds a token's heads together. Packed sequences are one batch entry. With pages, k and v are
// [pages, heads, rows, dim], and `params` are Paged<Sm90aForwardParams>.
struct TensorMapShapes {
  TensorMapShape q, k, v;
};
TensorMapShapes tensor_map_shapes(const AttentionSpec& spec, const KernelConfig& config,
                                  const device::Sm90aForwardParams& params);

// A box has at most 256 elements, and rows of 8-bit keys and values come in one, so maps may have wider
// elements.
int stored_element_bytes(const AttentionSpec& spec);

// Encodes the maps; a context must be current. Elements past a tensor's end read as
// zeros. Throws invalid_argument for strides that the copy engine does not take.
void encode_tensor_maps(const AttentionSpec& spec, const KernelConfig& config,
                        const device::Sm90aForwardParams& params, device::ForwardMaps& maps);
// Those of gathered keys, once the others are encoded; `params` are WithGathered<Sm90aForwardParams>.
struct GatheredMapShapes {
  TensorMapShape k, v;
};
GatheredMapShapes gathered_map_shapes(const AttentionSpec& spec, const KernelConfig& config,
                                      const device::Sm90aForwardParams& params);
void encode_gathered_maps(const AttentionSpec& spec, const KernelConfig& config,
                          const device::Sm90aForwardParams& params, device::GatheredMaps& maps);

// The same for the backward's inputs, in boxes of 64 rows, of wide heads 32.
struct BackwardMapShapes {
  TensorMapShape q, k, v, d_o;
};
BackwardMapShapes backward_map_shapes(const AttentionSpec& spec, const device::BackwardParams& params);
void encode_backward_maps(const AttentionSpec& spec, const device::BackwardParams& params,
                          device::BackwardMaps& maps);

}  // namespace flashjit::cuda
