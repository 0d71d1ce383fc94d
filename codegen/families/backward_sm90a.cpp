// Backward on sm_90a, by wgmma.
#include <algorithm>
#include <iterator>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/families/wgmma_products.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "shared/backward_cuda_params.h"
#include "shared/backward_sm90a_params.h"
#include "shared/backward_sm90a_wide_layout.h"

namespace flashjit::backward_sm90a {

namespace {

constexpr std::string_view fields[] = {"head_dim_v", "mask",   "dropout",     "varlen",  "deterministic",
                                       "o_dtype",    "score",  "grad_dtype",  "tables",  "scalars",
                                       "precise",    "config", "sink_logits", "offsets", "batch_invariant"};
constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

// The blocks of keys: 64 for each of two warpgroups, and one for sequences of few keys.
constexpr int long_keys = 128, few_keys = 64;
constexpr int warps(int block_n) {
  return block_n / 16 + 4;  // 4 copy
}

using device::BackwardSums;
using Layout = device::Sm90aBackwardLayout;

// Whether blocks of the grid make either dK or dV.
bool divides_sums(const AttentionSpec& spec) {
  return device::backward_divides_sums(spec.head_dim, spec.head_dim_v);
}
// Whether they make one of dK, dV and dQ.
bool is_wide(const AttentionSpec& spec) {
  return device::backward_is_wide(spec.head_dim, spec.head_dim_v);
}
// The only config of wide heads: its blocks' registers and shared memory are full.
constexpr KernelConfig wide_config{.block_m = device::Sm90aWideLayout::block,
                                   .block_n = device::Sm90aWideLayout::own,
                                   .num_stages = 1,
                                   .num_warps = device::Sm90aWideLayout::threads / 32};
int wide_shared_memory(const AttentionSpec& spec, device::WideSums sums) {
  return device::Sm90aWideLayout(sums, spec.head_dim, spec.head_dim_v, spec.dropout, has_derivatives(spec))
      .end;
}

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  if (is_wide(spec))
    return std::max(wide_shared_memory(spec, device::WideSums::dk),
                    wide_shared_memory(spec, device::WideSums::dv));
  const int most = backward_layout(spec, config).end;
  return divides_sums(spec) ? std::max(most, backward_layout(spec, config, BackwardSums::dv).end) : most;
}
int dq_shared_memory(const AttentionSpec& spec) {
  if (is_wide(spec)) return wide_shared_memory(spec, device::WideSums::dq);
  return device::Sm90aDqLayout(spec.head_dim, spec.head_dim_v, spec.dropout).end;
}

bool has_block_lists(const AttentionSpec& spec) {
  return std::any_of(spec.mask.begin(), spec.mask.end(),
                     [](const Mask& mask) { return std::holds_alternative<BlockSparseMask>(mask); });
}
// Sums that a thread holds at once: scores and dP of 64 keys, dK and dV of the keys or either.
int held_registers(const AttentionSpec& spec, const KernelConfig& config) {
  const bool divides = divides_sums(spec);
  const int columns = divides ? std::max(spec.head_dim, spec.head_dim_v) : spec.head_dim + spec.head_dim_v;
  const Layout layout = backward_layout(spec, config);
  return (layout.score_rows + layout.tile_rows + columns) / 2;
}
// The most that leave enough of a thread's 232 registers for the rest. Where rows are taken in tiles, a
// thread has 240, and weights and dS take half as many. Formulas that are computed beside the scores take
// some. Beside formulas with derivatives dropout holds a bit for each weight. Found by compiling;
// tests/compile holds every config to no spills.
int register_budget(const AttentionSpec& spec, const KernelConfig& config) {
  if (config.block_n == few_keys) return 176;  // of 216
  if (config.block_m <= 64) return spec.head_dim + spec.head_dim_v > 256 && !divides_sums(spec) ? 208 : 192;
  if (spec.dropout && has_derivatives(spec)) return 144;
  const bool looks_up = masks_are_tested(spec) || (spec.dropout && (spec.varlen || has_block_lists(spec)));
  return has_derivatives(spec) || looks_up ? 176 : 192;
}

std::string misfit_of_wide(const KernelConfig& config) {
  const auto refuse = [](const char* choice, int value, int only) {
    return wrong(choice, value,
                 "is not " + std::to_string(only) + ", as head_dim or head_dim_v is above 256");
  };
  if (config.block_m != wide_config.block_m) return refuse("block_m", config.block_m, wide_config.block_m);
  if (config.block_n != wide_config.block_n) return refuse("block_n", config.block_n, wide_config.block_n);
  if (config.num_stages != wide_config.num_stages)
    return refuse("num_stages", config.num_stages, wide_config.num_stages);
  if (config.num_warps != wide_config.num_warps)
    return refuse("num_warps", config.num_warps, wide_config.num_warps);
  return {};
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (is_wide(spec)) return misfit_of_wide(config);
  if (config.block_n != long_keys && config.block_n != few_keys)
    return wrong("block_n", config.block_n, "is not 64 or 128, 64 keys for each warpgroup that computes");
  if (config.block_n == few_keys && std::max(spec.head_dim, spec.head_dim_v) > Layout::panel)
    return wrong("block_n", config.block_n, "is not 128, as head_dim or head_dim_v is above 64");
  if (const int needed = warps(config.block_n); config.num_warps != needed)
    return wrong("num_warps", config.num_warps,
                 "is not " + std::to_string(needed) + ": 4 that copy, and 4 for every 64 of block_n " +
                     std::to_string(config.block_n));
  if (config.block_m != 64 && config.block_m != config.block_n)
    return wrong("block_m", config.block_m,
                 config.block_n == few_keys ? "is not 64, as block_n" : "is not 64 or 128");
  if (config.num_stages != 2 && !(config.num_stages == 1 && divides_sums(spec)))
    return wrong("num_stages", config.num_stages, divides_sums(spec) ? "is not 1 or 2" : "is not 2");
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  if (const int held = held_registers(spec, config); held > register_budget(spec, config)) {
    return "block_m " + std::to_string(config.block_m) + " holds " + std::to_string(held) +
           " sums in registers, more than the " + std::to_string(register_budget(spec, config)) +
           " that a thread has for them";
  }
  const int bytes =
      std::max(shared_memory(spec, config),
               CudaBackwardKernels(spec, config, true).separate_dq ? dq_shared_memory(spec) : 0);
  return too_much_shared_memory(config, {"block_m", "block_n", "num_stages"}, bytes, target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  if (is_wide(spec))
    return {.block_m = {wide_config.block_m},
            .block_n = {wide_config.block_n},
            .num_stages = {wide_config.num_stages},
            .num_warps = {wide_config.num_warps}};
  ConfigAxes axes{.block_m = {64, 128},
                  .block_n = {few_keys, long_keys},
                  .num_stages = {1, 2},
                  .num_warps = {warps(few_keys), warps(long_keys)}};
  fix_blocks(spec, target, axes);
  return axes;
}

// The first that fits: half of a tile of 128 rows or keys would be empty in sequences of 64. Two stages are
// better than one, also where they leave no room for dQ.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  if (is_wide(spec)) return wide_config;
  constexpr KernelConfig configs[] = {{64, few_keys, 2, warps(few_keys)},
                                      {128, long_keys, 2, warps(long_keys)},
                                      {64, long_keys, 2, warps(long_keys)},
                                      {64, long_keys, 1, warps(long_keys)}};
  for (const KernelConfig& config : configs)
    if ((config.block_m <= 64 || shape.seqlen_q > 64) &&
        (config.block_n > few_keys || shape.seqlen_k <= few_keys) && misfit(spec, target, config).empty())
      return config;
  return configs[std::size(configs) - 1];
}

std::string function(const char* name, const std::string& bounds, const std::string& params, const char* more,
                     const char* body) {
  return std::string("extern \"C\" __global__ void __launch_bounds__(") + bounds + ")\n    flashjit_" + name +
         "(const __grid_constant__ " + params + " params" + more + ") {\n  " + body + ";\n}\n";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const KernelConfig& config = source.config;
  const char* const maps = ",\n        const __grid_constant__ BackwardMaps maps";
  const int threads = config.num_warps * 32;
  const CudaBackwardKernels kernels(spec, config, true);
  const ParamsType type = params_of<device::CudaBackwardParams>(spec),
                   with_maps = with_second<device::BackwardMaps>(type);
  const std::string& params = type.text;
  const bool wide = kernels.wide, has_dq_products = kernels.separate_dq && !wide;
  const int dq_threads = wide ? threads : device::Sm90aDqLayout::threads;
  source.text +=
      include_lines(wide ? "cuda/backward_sm90a_wide.cuh" : "cuda/backward_sm90a.cuh", spec, nullptr) +
      (wide                  ? "#include \"cuda/backward_sm90a_wide_dq.cuh\"\n"
       : kernels.separate_dq ? "#include \"cuda/backward_sm90a_dq.cuh\"\n"
                             : "") +
      "#pragma nv_hdrstop\n\n" +
      structs(spec, "BackwardCudaSpec", params,
              wide ? wide_backward_products(spec) : backward_products(spec, config), choices, config,
              has_dq_products ? "BackwardProducts;\n  using DqProducts = DqProducts" : "BackwardProducts",
              ComputedAhead::key) +
      function("backward_prepare", "backward_threads, backward_first_blocks_sm90a<Spec>", params, "",
               "backward_prepare<Spec, true>(params)") +
      function("backward", "Config::num_warps * 32, " + std::to_string(kernels.resident_blocks), params, maps,
               wide ? "backward_sm90a_wide<Spec, Config>(params, maps)"
                    : "backward_sm90a<Spec, Config>(params, maps)") +
      (wide                  ? function("backward_dq", "Config::num_warps * 32, 1", params, maps,
                                        "backward_dq_sm90a_wide<Spec, Config>(params, maps)")
       : kernels.separate_dq ? function("backward_dq", "Sm90aDqLayout::threads, 1", params, maps,
                                        "backward_dq_sm90a<Spec, Config>(params, maps)")
                             : "") +
      (kernels.finishes ? function("backward_finish", "backward_threads, backward_blocks", params, "",
                                   kernels.persistent || wide ? "backward_finish<Spec, true>(params)"
                                                              : "backward_finish<Spec, false>(params)")
                        : "") +
      (kernels.has_exact_sums ? function("backward_tables", "backward_threads, backward_blocks", params, "",
                                         "backward_tables<Spec>(params)")
                              : "");
  source.steps.push_back(
      {.function = "flashjit_backward_prepare", .threads = device::backward_threads, .params = type});
  source.steps.push_back({.function = "flashjit_backward",
                          .threads = threads,
                          .shared_memory = shared_memory(spec, config),
                          .params = with_maps});
  if (kernels.separate_dq)
    source.steps.push_back({.function = "flashjit_backward_dq",
                            .threads = dq_threads,
                            .shared_memory = dq_shared_memory(spec),
                            .params = with_maps});
  add_last_step(spec, type, source);
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::backward,
    .on = Target::Family::cuda,
    .needs = Instructions::wgmma,
    .head_dim = heads_to_512,
    .dtypes = two_byte_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::backward_sm90a
