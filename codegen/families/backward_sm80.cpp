// Backward on every GPU from sm_80 up, by mma.sync: a block has block_n
// keys of a key/value head and passes block_m query rows by at a time.
#include <algorithm>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/backward_cuda_params.h"

namespace flashjit::backward_sm80 {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "mask",   "dropout",     "varlen",  "deterministic",
                                       "o_dtype",    "score",  "grad_dtype",  "tables",  "scalars",
                                       "precise",    "config", "sink_logits", "offsets", "batch_invariant"};
constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  return device::CudaBackwardLayout(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                    config.num_stages, spec.dropout, spec.deterministic)
      .end;
}
int dq_shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  return device::CudaBackwardDqLayout(
             spec.head_dim, spec.head_dim_v, device::backward_dq_rows(config.num_warps),
             device::backward_dq_keys(spec.head_dim, spec.head_dim_v), 2, spec.dropout)
      .end;
}

int column_parts(const AttentionSpec& spec) {
  return device::backward_column_parts(spec.head_dim, spec.head_dim_v);
}

// Four warps have 16 keys of heads of more than 256 columns, and each 16 rows or more of the scores: the
// least tile, which has no room everywhere.
constexpr KernelConfig least_wide = {64, 32, 1, 8};
std::string refusal(const AttentionSpec& spec, const Target& target) {
  if (column_parts(spec) < 4) return {};
  const std::string heads = "head_dim " + std::to_string(spec.head_dim) + " with head_dim_v " +
                            std::to_string(spec.head_dim_v) + " of op backward on " + target.str();
  if (spec.deterministic)
    return "deterministic is not supported for " + heads +
           ": a warp that sums dQ alone has registers for 256 columns; false would work there, and 256";
  const int bytes = shared_memory(spec, least_wide), most = target.max_shared_memory();
  if (bytes <= most) return {};
  return heads + " needs " + std::to_string(bytes) + " bytes of shared memory for 32 keys and " +
         std::to_string(least_wide.block_m) + " rows, more than the " + std::to_string(most) +
         " of a block; 256 for both would work there";
}

int keys_of_a_warp(const AttentionSpec& spec, const KernelConfig& config) {
  return config.block_n * column_parts(spec) / config.num_warps;
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (config.num_warps != 4 && config.num_warps != 8)
    return wrong("num_warps", config.num_warps, "is not 4 or 8");
  if (config.num_stages != 1 && config.num_stages != 2)
    return wrong("num_stages", config.num_stages, "is not 1 or 2");
  if (config.block_m != 16 && config.block_m != 32 && config.block_m != 64 && config.block_m != 128)
    return wrong("block_m", config.block_m, "is not 16, 32, 64 or 128");
  const int parts = column_parts(spec);
  if (config.block_m < 16 * parts)
    return wrong("block_m", config.block_m,
                 parts == 2 ? "is not 32, 64 or 128, 16 rows or more for each of two warps"
                            : "is not 64 or 128, 16 rows or more for each of four warps");
  const int unit = 16 * config.num_warps / parts;
  if (config.block_n != unit && config.block_n != 2 * unit)
    return wrong("block_n", config.block_n,
                 "is not " + std::to_string(unit) + " or " + std::to_string(2 * unit) +
                     ", 16 or 32 keys for each of " + std::to_string(config.num_warps) + " warps" +
                     (parts == 1   ? ""
                      : parts == 2 ? ", of which two have the same keys"
                                   : ", of which four have the same keys"));
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  const int bytes =
      std::max(shared_memory(spec, config), spec.deterministic ? dq_shared_memory(spec, config) : 0);
  return too_much_shared_memory(config, {"block_m", "block_n", "num_stages"}, bytes, target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes{
      .block_m = {16, 32, 64, 128}, .block_n = {32, 64, 128, 256}, .num_stages = {1, 2}, .num_warps = {4, 8}};
  fix_blocks(spec, target, axes);
  return axes;
}

// Sums that a thread holds: of dK and dV, and of the scores twice.
int held_sums(const AttentionSpec& spec, const KernelConfig& config) {
  return keys_of_a_warp(spec, config) / 16 * ((spec.head_dim + spec.head_dim_v) / 2 + config.block_m) /
         column_parts(spec);
}

std::string futility(const AttentionSpec& spec, const Target&, const KernelConfig& config) {
  return too_many_sums(held_sums(spec, config));
}

// Whether little beyond the sums needs registers.
bool plain(const AttentionSpec& spec) {
  const auto causal = [](const Mask& mask) { return std::holds_alternative<CausalMask>(mask); };
  return !spec.deterministic && std::ranges::all_of(spec.mask, causal);
}

KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape&) {
  // Fewer scores at a time where the masks' test takes registers. A single stage of 64 rows spills there, and
  // so do more sums than these beside both dropout and such masks.
  constexpr KernelConfig masked[] = {{32, 128, 2, 8}, {32, 128, 1, 8}, {64, 64, 2, 8}, {32, 64, 2, 8}};
  const int most = spec.dropout && !plain(spec) ? 176 : most_sums;
  constexpr KernelConfig narrow[] = {{32, 128, 2, 4}, {32, 128, 1, 4}};
  constexpr KernelConfig others[] = {{64, 128, 2, 8}, {64, 128, 1, 8}, {64, 64, 2, 8}, {64, 64, 1, 8},
                                     {32, 64, 1, 8},  {32, 64, 1, 4},  {32, 32, 1, 4}};
  const auto fits = [&](const KernelConfig& config) {
    return misfit(spec, target, config).empty() && futility(spec, target, config).empty();
  };
  // 32 keys a warp spill beside dropout.
  if (constexpr KernelConfig deeper = {64, 32, 2, 8}; column_parts(spec) == 4)
    return fits(deeper) ? deeper : least_wide;
  const bool wide = std::max(spec.head_dim, spec.head_dim_v) > 64;
  // Elsewhere, and with other masks, four warps of so many sums spill.
  if (!wide && target.level == 90 && plain(spec))
    for (const KernelConfig& config : narrow)
      if (fits(config)) return config;
  if (wide && (reads_tables(spec) || (spec.dropout && (!plain(spec) || target.level < 90))))
    for (const KernelConfig& config : masked)
      if (fits(config) && held_sums(spec, config) <= most) return config;
  for (const KernelConfig& config : others)
    if (fits(config)) return config;
  return others[std::size(others) - 1];
}

std::string function(const char* name, const std::string& threads, const std::string& params,
                     const char* body) {
  return std::string("extern \"C\" __global__ void __launch_bounds__(") + threads + ")\n    flashjit_" +
         name + "(const __grid_constant__ " + params + " params) {\n  " + body + "(params);\n}\n";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const KernelConfig& config = source.config;
  const int threads = config.num_warps * 32;
  const ParamsType type = params_of<device::CudaBackwardParams>(spec);
  const std::string of_block = "Config::num_warps * 32", &params = type.text;
  source.text +=
      include_lines(spec.deterministic ? "cuda/backward_dq_sm80.cuh" : "cuda/backward_sm80.cuh", spec,
                    nullptr) +
      (spec.deterministic ? "#include \"cuda/backward_sm80.cuh\"\n" : "") + "#pragma nv_hdrstop\n\n" +
      structs(spec, "BackwardCudaSpec", params, "", choices, config, "", ComputedAhead::key) +
      function("backward_prepare", "backward_threads, backward_first_blocks", params,
               "backward_prepare<Spec, false>") +
      function("backward", of_block, params, "backward_sm80<Spec, Config>") +
      (spec.deterministic
           ? function("backward_dq", of_block, params, "backward_dq_sm80<Spec, Config>")
           : function("backward_finish", "backward_threads", params, "backward_finish<Spec, false>")) +
      (CudaBackwardKernels(spec, config, false).has_exact_sums
           ? function("backward_tables", "backward_threads", params, "backward_tables<Spec>")
           : "");
  // At its default level ptxas loads operands early until the registers overflow, or squeezes small kernels
  // into fewer registers than they need. Both cause spills.
  const int held = held_sums(spec, config);
  const bool more = !plain(spec) || spec.dropout || spec.head_dim % 16;
  const bool wide = spec.head_dim + spec.head_dim_v > 256;
  // Gradients of 32 bits have one address more, for which sm_120 has no register beside lists.
  const auto* lists = find_mask<BlockSparseMask>(spec.mask);
  const bool wide_gradients = lists && lists->per_head && spec.grad_dtype == DType::fp32;
  const bool full = held >= (wide_gradients && source.target.level == 120 ? 160 : 176);
  if (spec.deterministic || wide || held <= 80 || (more && full))
    source.options.push_back("--ptxas-options=-O1");
  source.steps.push_back(
      {.function = "flashjit_backward_prepare", .threads = device::backward_threads, .params = type});
  source.steps.push_back({.function = "flashjit_backward",
                          .threads = threads,
                          .shared_memory = shared_memory(spec, config),
                          .params = type});
  if (spec.deterministic)
    source.steps.push_back({.function = "flashjit_backward_dq",
                            .threads = threads,
                            .shared_memory = dq_shared_memory(spec, config),
                            .params = type});
  add_last_step(spec, type, source);
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::backward,
    .on = Target::Family::cuda,
    .head_dim = heads_to_512,
    .dtypes = two_byte_dtypes,
    .fields = fields,
    .masks = all_masks,
    .refusal = refusal,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::backward_sm80
