// Forward on CPUs: a tile is block_m query rows against block_n keys in one thread's scratch.
#include <algorithm>

#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/cpu_products.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "shared/forward_cpu_params.h"

namespace flashjit::forward_cpu {
namespace {

constexpr std::string_view fields[] = {
    "head_dim_v", "v_in_k", "mask",          "dropout",         "lse",
    "varlen",     "paged",  "deterministic", "o_dtype",         "kv_dtype",
    "kv_scale",   "score",  "tables",        "scalars",         "sink_logits",
    "precise",    "config", "offsets",       "batch_invariant", "gathered"};
constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (std::string why = not_of_cpus(config, {"block_m", "block_n"}, 16); !why.empty()) return why;
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  return too_much_scratch(config, {"block_m", "block_n"}, cpu_scratch(spec, target, config), target);
}

bool fits(const AttentionSpec& spec, const Target& target, int block_m, int block_n) {
  return cpu_scratch(spec, target, {.block_m = block_m, .block_n = block_n}) <= largest_scratch;
}

// AMX kernels have four times the rows: converting a K/V block costs them four times as much,
// relative to the products. AMX kernels of narrow heads compute the scores of few keys at a
// time whatever block_n is; those of wider heads compute the scores of a whole block at once.
ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes = {
      .block_m = {96, 192, 384}, .block_n = {64, 128, 256, 512}, .num_stages = {1}, .num_warps = {1}};
  if (uses_amx(spec, target)) axes.block_m = {256, 512, 1024};
  if (uses_amx(spec, target) && !keeps_amx_tiles(spec, target)) axes.block_n = {64, 128, 192, 256};
  if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    // A tile spans whole lists, and more rows than usual: it converts every
    // block that any of its lists keeps, and few of them share each block.
    axes.block_m = {192, 384, 768};
    for (int& rows : axes.block_m) rows = std::max(rows / blocks->block_m, 1) * blocks->block_m;
    axes.block_m.erase(std::unique(axes.block_m.begin(), axes.block_m.end()), axes.block_m.end());
    axes.block_n = {blocks->block_n >= 64 ? blocks->block_n : device::round_up(64, blocks->block_n)};
    if (blocks->block_n % 128 == 0 && blocks->block_n > 128) axes.block_n.insert(axes.block_n.begin(), 128);
  }
  // The widest heads have no room for these: the larger side is halved until the smallest tile fits.
  while (!fits(spec, target, axes.block_m.front(), axes.block_n.front())) {
    std::vector<int>& sizes = axes.block_n.front() > 64 ? axes.block_n : axes.block_m;
    sizes.insert(sizes.begin(), device::round_up(sizes.front() / 2, 16));
  }
  fix_blocks(spec, target, axes);
  return axes;
}

// block_m: the rows of a tile share the conversion of each K/V block. The conversion takes a fifth
// of the time at 48 rows and a fortieth at 192; with AMX it takes as much at four times these rows,
// and scratch is to leave half of the second-level cache to the data that pass through. A launch
// with fewer rows, or too few tiles for its threads, uses smaller tiles (runtime/cpu/partition.hpp).
// block_n matters only within the noise, except with AMX. Wide heads' sums go through memory once a block,
// and a block's scores fill the first-level cache. Narrow heads' O stays in that cache for a block.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape&) {
  const bool amx = uses_amx(spec, target);
  const int usual = keeps_amx_tiles(spec, target) ? 512 : amx && spec.head_dim <= 128 ? 192 : 128;
  const ConfigAxes values = axes(spec, target);
  const bool has_usual =
      std::find(values.block_n.begin(), values.block_n.end(), usual) != values.block_n.end();
  KernelConfig config{.block_m = values.block_m.front(),
                      .block_n = has_usual && fits(spec, target, values.block_m.front(), usual)
                                     ? usual
                                     : values.block_n.front(),
                      .num_stages = 1,
                      .num_warps = 1};
  for (KernelConfig larger = config; const int block_m : values.block_m) {
    larger.block_m = block_m;
    if (cpu_scratch(spec, target, larger) <= (amx ? largest_scratch / 2 : largest_scratch)) config = larger;
  }
  return config;
}

struct Products {
  const char *type, *header;
};
Products products_of(const AttentionSpec& spec, const Target& target) {
  if (keeps_amx_tiles(spec, target)) return {"AmxKeptProducts", "cpu/amx_kept_products.h"};
  if (uses_amx(spec, target)) return {"AmxProducts", "cpu/amx_products.h"};
  return {"VectorProducts", "cpu/vector_products.h"};
}

ParamsType params_of_step(const AttentionSpec& spec) {
  return params_of<device::CpuForwardParams, true>(spec);
}

std::string function_text(const AttentionSpec& spec) {
  return R"(extern "C" void flashjit_forward(const )" + params_of_step(spec).text +
         R"(* params, i64 begin, i64 end, void* scratch) {
  forward<Spec, Config>(*params, begin, end, scratch);
}
)";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const Products products = products_of(spec, source.target);
  source.text +=
      include_lines("cpu/forward.h", spec, spec.kv_dtype ? "cpu/quantised_keys.h" : "cpu/paged_keys.h") +
      "#include \"" + products.header + "\"\n\n" +
      structs(spec, "ForwardCpuSpec", params_of_step(spec).text, "", choices, source.config,
              std::string(products.type) + "<Spec, Config>") +
      function_text(spec);
  source.steps.push_back({.function = "flashjit_forward",
                          .scratch = cpu_scratch(spec, source.target, source.config),
                          .params = params_of_step(spec)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::forward,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::forward_cpu
