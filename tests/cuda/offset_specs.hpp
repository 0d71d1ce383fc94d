// Shards of longer sequences for emulated kernels, as codegen renders them.
#pragma once

#include <type_traits>
#include <utility>

#include "codegen/spec/spec.hpp"
#include "shared/offsets.h"

namespace flashjit::testing_support {

// Params: the kernel's, with all that the spec adds otherwise. Base: a Spec without masks.
template <class Base, class Params, class... Masks>
struct WithShard : Base {
  using Whole = device::WithOffsets<Params>;
  using Mask = device::Intersect<device::Bounds, device::OffsetMask<Masks, Whole>...>;
  using Offsets = device::PositionOffsets<Whole>;
};
template <class Spec, class Params>
using ParamsInShard = std::conditional_t<Spec::Offsets::exist, device::WithOffsets<Params>, Params>;

template <class Spec>
AttentionSpec with_offsets(AttentionSpec spec) {
  spec.offsets = Spec::Offsets::exist;
  return spec.validated();
}

}  // namespace flashjit::testing_support
