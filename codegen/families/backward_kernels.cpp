#include "codegen/families/backward_kernels.hpp"

#include <algorithm>

#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/backward_cuda_params.h"
#include "shared/backward_sm90a_layout.h"
#include "shared/backward_sm90a_wide_layout.h"

namespace flashjit {

namespace {

// Whether shared memory has room for the sums of dQ, so that one thread adds them, and registers for all rows
// of a step at once.
bool copies_dq(const AttentionSpec& spec, const KernelConfig& config) {
  const device::Sm90aBackwardLayout layout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                           config.num_stages, spec.dropout, false, has_derivatives(spec),
                                           device::BackwardSums::both);
  return layout.stages_dq && layout.tile_rows == config.block_m;
}

}  // namespace

CudaBackwardKernels::CudaBackwardKernels(const AttentionSpec& spec, const KernelConfig& config, bool wgmma)
    : by_wgmma(wgmma),
      wide(by_wgmma && device::backward_is_wide(spec.head_dim, spec.head_dim_v)),
      divides_sums(wide || (by_wgmma && device::backward_divides_sums(spec.head_dim, spec.head_dim_v))),
      persistent(by_wgmma && !divides_sums),
      resident_blocks(by_wgmma && !wide ? device::Sm90aBackwardLayout::resident_blocks(config.block_n) : 1),
      has_row_bits(by_wgmma && std::any_of(spec.mask.begin(), spec.mask.end(),
                                           [](const Mask& mask) {
                                             const auto* window = std::get_if<SlidingWindowMask>(&mask);
                                             return !std::holds_alternative<CausalMask>(mask) &&
                                                    !std::holds_alternative<PaddingMask>(mask) &&
                                                    !(window && !window->sinks);
                                           })),
      separate_dq(wide || (spec.deterministic && (!by_wgmma || has_row_bits || has_gradients(spec) ||
                                                  (persistent && !copies_dq(spec, config))))),
      finishes(!separate_dq || (spec.sink_logits && !spec.deterministic)),
      has_exact_sums(spec.deterministic && has_gradients(spec)),
      deterministic(spec.deterministic) {}

void add_last_step(const AttentionSpec& spec, const ParamsType& params, KernelSource& source) {
  const CudaBackwardKernels kernels(spec, source.config, source.target);
  if (!kernels.finishes && !kernels.has_exact_sums) return;
  source.steps.push_back(
      {.function = kernels.has_exact_sums ? "flashjit_backward_tables" : "flashjit_backward_finish",
       .threads = device::backward_threads,
       .shared_memory = spec.sink_logits ? device::backward_sinks_shared : 0,
       .params = params});
}

}  // namespace flashjit
