// Forward on every GPU from sm_80 up: mma.sync kernels in which a warp owns 16 query rows, or a multiple, of
// the tile.
#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/forward_sm80_params.h"
#include "shared/layout.h"

namespace flashjit::forward_sm80 {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "v_in_k",   "mask",           "dropout",
                                       "lse",        "varlen",   "paged",          "deterministic",
                                       "o_dtype",    "kv_dtype", "kv_scale",       "score",
                                       "tables",     "scalars",  "sink_logits",    "precise",
                                       "config",     "offsets",  "batch_invariant"};
constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

constexpr int rows_of_a_warp = 16;

// Whether two warps share rows, and divide the columns of their output.
bool divides_columns(const AttentionSpec& spec) {
  return device::cuda_forward_column_groups(spec.head_dim, spec.head_dim_v) > 1;
}

int shared_memory(const AttentionSpec& spec, const KernelConfig& config) {
  if (spec.kv_dtype)
    return device::cuda_quantised_forward_shared_memory(spec.head_dim, spec.head_dim_v, config.block_m,
                                                        config.block_n, spec.kv_scale == KvScale::token_head);
  return device::cuda_forward_shared_memory(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                            config.num_stages, spec.dropout);
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (config.num_warps != 4 && config.num_warps != 8)
    return wrong("num_warps", config.num_warps, "is not 4 or 8");
  if (config.num_stages != 1 && config.num_stages != 2) {
    return wrong("num_stages", config.num_stages, "is not 1 or 2");
  }
  if (spec.kv_dtype && config.num_stages != 2)
    return wrong("num_stages", config.num_stages,
                 "is not 2 with kv_dtype: one block as it is stored, one converted");
  const int rows = rows_of_a_warp * config.num_warps;
  if (divides_columns(spec) && config.block_m != rows / 2)
    return wrong("block_m", config.block_m,
                 "is not " + std::to_string(rows / 2) + ": with heads of more than 256 columns two of " +
                     std::to_string(config.num_warps) + " warps share 16 rows");
  if (!divides_columns(spec) &&
      (config.block_m <= 0 || config.block_m % rows != 0 || config.block_m > 2 * rows)) {
    return wrong("block_m", config.block_m,
                 "is not " + std::to_string(rows) + " or " + std::to_string(2 * rows) +
                     ", 16 or 32 rows for each of " + std::to_string(config.num_warps) + " warps");
  }
  if (config.block_n <= 0 || config.block_n % 16 != 0 || config.block_n > 256) {
    return wrong("block_n", config.block_n, "is not a multiple of 16 up to 256");
  }
  // Masks say which of 16 keys, or of a multiple, are seen.
  if (divides_columns(spec) && config.block_n != 16 && config.block_n % 32 != 0)
    return wrong("block_n", config.block_n,
                 "is not 16 or a multiple of 32: each of two warps takes half of the keys");
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  return too_much_shared_memory(config, {"block_m", "block_n", "num_stages"}, shared_memory(spec, config),
                                target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes{.block_m = {64, 128, 256},
                  .block_n = {32, 48, 64, 80, 96, 112, 128},
                  .num_stages = {1, 2},
                  .num_warps = {4, 8}};
  if (divides_columns(spec)) {
    axes.block_m = {32, 64};
    axes.block_n = {16, 32, 64};
  }
  fix_blocks(spec, target, axes);
  return axes;
}

// Warps that a multiprocessor's shared memory has room for. It has 1
// KB more than a block may ask for, and reserves 1 KB for each block.
int resident_warps(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const int blocks = (target.max_shared_memory() + 1024) / (shared_memory(spec, config) + 1024);
  return blocks * config.num_warps;
}

std::string futility(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  // Tiles of wide heads take most of the memory of some targets.
  const int least_warps = divides_columns(spec) ? 4 : 8;
  const int accumulators =
      device::cuda_forward_accumulators(spec.head_dim_v, config.block_m, config.block_n, config.num_warps);
  if (std::string why = too_many_sums(accumulators); !why.empty()) return why;
  const int warps = resident_warps(spec, target, config);
  if (warps < least_warps) {
    return "shared memory lets a multiprocessor hold " + std::to_string(warps) +
           " warps, fewer than the eight that registers allow; too few warps hide no latency";
  }
  KernelConfig pair = config;
  pair.block_n = 32;
  pair.num_stages = 1;
  if (warps == 4 && resident_warps(spec, target, pair) >= 8 && misfit(spec, target, pair).empty())
    return "four warps are alone on a multiprocessor; two blocks of four fit with 32 keys in one stage";
  const bool ends_vary = spec.varlen || find_mask<PaddingMask>(spec.mask);
  if (target.level == 90 && spec.kv_scale == KvScale::token_head && accumulators == 192 &&
      spec.score.empty() && ends_vary && find_mask<CausalMask>(spec.mask)) {
    return "beside scales of rows, sums of 64 keys and 128 columns leave too few registers for a diagonal "
           "and "
           "lengths";
  }
  if (config.num_warps == 8 && config.block_m < 256 && spec.head_dim_v <= 128 && !divides_columns(spec)) {
    return "eight warps of 16 rows read K and V from shared memory twice as often as warps of 32 rows; "
           "up to head_dim_v 128 there are registers for 32 rows";
  }
  return {};
}

KernelConfig first_that_pays(const AttentionSpec& spec, const Target& target,
                             const std::vector<KernelConfig>& candidates) {
  for (const KernelConfig& config : candidates) {
    if (futility(spec, target, config).empty() && misfit(spec, target, config).empty()) return config;
  }
  return candidates.back();
}

// Measured on an H200 (tests/bench/gpu_forward.md). The other targets
// take the first config of the list that keeps eight warps resident.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  constexpr KernelConfig short_sequences[] = {{64, 64, 2, 4}, {64, 64, 1, 4}, {64, 32, 1, 4}};
  constexpr KernelConfig small_heads[] = {{128, 64, 2, 4}, {128, 64, 1, 4}, {128, 32, 1, 4}};
  constexpr KernelConfig others[] = {{64, 64, 1, 4}, {128, 64, 1, 8}, {128, 32, 1, 8}};
  constexpr KernelConfig wide_heads[] = {
      {64, 64, 1, 8}, {64, 32, 1, 8}, {64, 16, 1, 8}, {32, 32, 1, 4}, {32, 16, 1, 4}};
  std::vector<KernelConfig> candidates;
  const auto add = [&](const auto& configs) {
    candidates.insert(candidates.end(), std::begin(configs), std::end(configs));
  };
  if (divides_columns(spec)) {
    add(wide_heads);
    // The place of a second stage has the next block as it is stored.
    if (spec.kv_dtype)
      for (KernelConfig& config : candidates) config.num_stages = 2;
    return first_that_pays(spec, target, candidates);
  }
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  // A tile that spans several query blocks of a list computes,
  // for all its rows, every key block that any of them lists.
  if (shape.seqlen_q <= 64 || (blocks && blocks->block_m % 128 != 0)) add(short_sequences);
  // Tables of formulas take registers, too.
  if (spec.head_dim_v <= 128 && !(reads_formula_params(spec) && work_of_formulas(spec).loads))
    add(small_heads);
  add(others);
  // Beside dropout a window's sinks leave the widest heads registers for 48 keys. Found by compiling for
  // sm_90.
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
  if (spec.dropout && window && window->sinks && spec.head_dim_v > 248)
    candidates.insert(candidates.begin(), {64, 48, 1, 4});
  if (spec.kv_dtype) {
    // Conversion takes registers, too; and it takes shared memory, of which some targets have little.
    constexpr KernelConfig narrow = {64, 32, 2, 4};
    candidates.insert(spec.head_dim_v > 128 ? candidates.begin() : candidates.end(), narrow);
    for (KernelConfig& config : candidates) config.num_stages = 2;
  }
  return first_that_pays(spec, target, candidates);
}

ParamsType params_of_step(const AttentionSpec& spec) {
  return params_of<device::Sm80ForwardParams, true>(spec);
}

std::string function_text(const AttentionSpec& spec) {
  return R"(extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_forward(const __grid_constant__ )" +
         params_of_step(spec).text + R"( params) {
  forward_sm80<Spec, Config>(params);
}
)";
}

// At its default level ptxas loads operands early until the registers overflow, or squeezes small kernels
// into fewer registers than they need. Both cause spills, and the former is slower. Found by compiling.
bool takes_level_1(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const int accumulators =
      device::cuda_forward_accumulators(spec.head_dim_v, config.block_m, config.block_n, config.num_warps);
  const bool tables = reads_tables(spec);
  const bool large = accumulators > 168 || (spec.dropout && accumulators > 144 && accumulators < 160);
  const bool two_look_up = tables + spec.dropout + spec.paged + spec.kv_dtype.has_value() >= 2;
  // On sm_90 and sm_100 two stages of columns that end in half a step fill the registers beside dropout.
  const bool half_step = spec.dropout && accumulators == 136 && config.num_stages == 2 &&
                         (target.level == 90 || (target.level == 100 && !spec.score.empty()));
  if (large || half_step || accumulators <= (tables ? 96 : 80) || two_look_up) return true;
  if (!divides_columns(spec)) return false;
  // Beside dropout, sm_80 lacks registers for Q, and others for the steps of the widest keys.
  const int with_q = accumulators + device::ceil_div(spec.head_dim, 16) * 4;
  const bool full =
      with_q <= 184 ? with_q > 168 && target.level == 80 : accumulators == 144 && spec.head_dim > 512;
  // Each of four warps copies more rows of a block, and a second stage has addresses, too.
  const bool many_rows =
      config.block_n == 64 &&
      (config.num_warps == 4 || (spec.paged && accumulators == 160 && config.num_stages == 2));
  return spec.dropout ? full : (tables || spec.paged) && many_rows;
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const KernelConfig& config = source.config;
  source.text += include_lines("cuda/forward_sm80.cuh", spec,
                               spec.kv_dtype ? "cuda/quantised_tile.cuh" : "cuda/paged_tile.cuh") +
                 (divides_columns(spec) ? "#include \"cuda/forward_sm80_columns.cuh\"\n" : "") +
                 "#pragma nv_hdrstop\n\n" +
                 structs(spec, "ForwardSm80Spec", params_of_step(spec).text, "", choices, config, "") +
                 function_text(spec);
  source.steps.push_back({.function = "flashjit_forward",
                          .threads = config.num_warps * 32,
                          .shared_memory = shared_memory(spec, config),
                          .params = params_of_step(spec)});
  if (takes_level_1(spec, source.target, config)) source.options.push_back("--ptxas-options=-O1");
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::forward,
    .on = Target::Family::cuda,
    .head_dim = heads_to_576,
    .dtypes = two_byte_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::forward_sm80
