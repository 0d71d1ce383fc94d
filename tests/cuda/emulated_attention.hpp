// Attention's kernels on the host (emulated.hpp): their masks and their specs. To be included after the
// kernels' headers.
#pragma once

#include <utility>
#include <vector>

#include "shared/block_sparse.h"
#include "shared/sliding_window.h"
#include "shared/tree.h"
#include "tests/cuda/emulated.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {

using device::Align;

template <class Defaults, class Element, int head_dim, int head_dim_v, class... Masks>
struct AttentionOf : HeadsOf<Defaults, Element, head_dim, head_dim_v> {
  using Mask = device::Intersect<device::Bounds, Masks...>;
};
template <class Spec>
struct Invariant : Spec {
  static constexpr bool batch_invariant = true;
};

using enum CausalAlign;
using BottomRight = device::Causal<Align::bottom_right>;
using TopLeft = device::Causal<Align::top_left>;
using Window = device::SlidingWindow<Align::bottom_right>;
using WindowWithSinks = device::SlidingWindowWithSinks<Align::bottom_right>;

// The spec of a kernel's Spec, without formulas, 8-bit keys and offsets.
template <class Spec>
AttentionSpec spec_of(Operation op, std::vector<Mask> masks) {
  SpecOptions options{.head_dim_v = Spec::head_dim_v,
                      .varlen = Spec::varlen,
                      .o_dtype = dtype_if_any<typename Spec::o_dtype>};
  if constexpr (requires { Spec::lse; }) options.lse = Spec::lse;
  if constexpr (requires { Spec::dropout; }) options.dropout = Spec::dropout;
  if constexpr (requires { Spec::paged; }) options.paged = Spec::paged;
  if constexpr (requires { Spec::v_in_k; }) options.v_in_k = Spec::v_in_k;
  if constexpr (requires { Spec::batch_invariant; }) options.batch_invariant = Spec::batch_invariant;
  return attention_spec(op, dtype_of<typename Spec::Element>, Spec::head_dim, std::move(masks), options);
}

}  // namespace flashjit::testing_support
