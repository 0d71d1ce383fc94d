#include "codegen/families/backward_kernels.hpp"

#include <algorithm>

#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/backward_cuda_params.h"
#include "shared/backward_sm90a_layout.h"

namespace flashjit {

CudaBackwardKernels::CudaBackwardKernels(const AttentionSpec& spec, const KernelConfig& config)
    : by_wgmma(config.num_warps > 8),
      divides_sums(by_wgmma && device::backward_divides_sums(spec.head_dim, spec.head_dim_v)),
      persistent(by_wgmma && !divides_sums),
      has_row_bits(by_wgmma && std::any_of(spec.mask.begin(), spec.mask.end(),
                                           [](const Mask& mask) {
                                             const auto* window = std::get_if<SlidingWindowMask>(&mask);
                                             return !std::holds_alternative<CausalMask>(mask) &&
                                                    !std::holds_alternative<PaddingMask>(mask) &&
                                                    !(window && !window->sinks);
                                           })),
      has_exact_sums(spec.deterministic && has_gradients(spec)) {}

void add_last_step(const AttentionSpec& spec, const ParamsType& params, KernelSource& source) {
  if (spec.deterministic && !has_gradients(spec)) return;
  source.steps.push_back(
      {.function = spec.deterministic ? "flashjit_backward_tables" : "flashjit_backward_finish",
       .threads = device::backward_threads,
       .shared_memory = spec.sink_logits ? device::backward_sinks_shared : 0,
       .params = params});
}

}  // namespace flashjit
