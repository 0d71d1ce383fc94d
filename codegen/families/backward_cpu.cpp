// Backward on CPUs: an item is every so-manieth block of block_n keys of a key/value head.
#include <algorithm>

#include "codegen/families/batch_invariant.hpp"
#include "codegen/families/cpu_products.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/formulas/formula_traits.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit::backward_cpu {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "mask",   "dropout",     "varlen",  "deterministic",
                                       "o_dtype",    "score",  "grad_dtype",  "tables",  "scalars",
                                       "precise",    "config", "sink_logits", "offsets", "batch_invariant"};
constexpr std::string_view choices[] = {"block_n", "num_stages", "num_warps"};

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (std::string why = not_of_cpus(config, {"block_n"}, 32); !why.empty()) return why;
  if (std::string why = not_fixed_blocks(spec, target, config); !why.empty()) return why;
  return too_much_scratch(config, {"block_n"}, cpu_backward_scratch(spec, target, config), target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes = {.block_m = {0}, .block_n = {128, 256, 512}, .num_stages = {1}, .num_warps = {1}};
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  if (blocks && !multiplies_bf16(spec, target))
    axes.block_n = {blocks->block_n >= 64 ? device::round_up(std::min(blocks->block_n, 256), 32)
                                          : device::round_up(64, device::round_up(blocks->block_n, 32))};
  // The widest heads have no room for these.
  while (cpu_backward_scratch(spec, target, {.block_n = axes.block_n.front()}) > largest_scratch)
    axes.block_n.insert(axes.block_n.begin(), device::round_up(axes.block_n.front() / 2, 32));
  fix_blocks(spec, target, axes);
  return axes;
}

// Q and dO are packed and dQ is added to once for each block: 256 keys take 5% less time than 128, 512 with
// AMX 20% less. Scratch leaves room in the second-level cache, of 2 MB where AVX-512 is, of 512 kB elsewhere.
// Blocks are what threads share: few heads of short sequences have smaller ones.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  constexpr int few = 8;
  const int room =
      multiplies_bf16(spec, target) ? largest_scratch * 3 / 4 : largest_scratch / (target.level < 4 ? 4 : 2);
  const std::vector<int> values = axes(spec, target).block_n;
  KernelConfig config{.block_n = values.front(), .num_stages = 1, .num_warps = 1};
  for (KernelConfig larger = config; const int block_n : values) {
    larger.block_n = block_n;
    const std::int64_t blocks = std::int64_t{shape.batch} * shape.num_heads_kv * (shape.seqlen_k / block_n);
    if (blocks >= few && cpu_backward_scratch(spec, target, larger) <= room) config = larger;
  }
  return config;
}

std::string function(const char* name, const std::string& params, const char* body, bool scratch = false) {
  return std::string("extern \"C\" void flashjit_") + name + "(const " + params +
         "* params, i64 begin, i64 end, void*" + (scratch ? " scratch" : "") + ") {\n  " + body +
         "(*params, begin, end" + (scratch ? ", scratch" : "") + ");\n}\n";
}

struct Products {
  const char *type, *header;
};
Products products_of(const AttentionSpec& spec, const Target& target) {
  if (uses_amx(spec, target)) return {"AmxBackward<Spec, Config>", "cpu/backward_amx.h"};
  if (multiplies_bf16(spec, target)) return {"PairBackward<Spec, Config>", "cpu/backward_pairs.h"};
  return {"VectorBackward<Spec, Config>", "cpu/backward_vectors.h"};
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const Products products = products_of(spec, source.target);
  const ParamsType type = params_of<device::CpuBackwardParams>(spec);
  const std::string& params = type.text;
  source.text += include_lines(products.header, spec) + "\n" +
                 structs(spec, "BackwardCpuSpec", params, "", choices, source.config, products.type) +
                 function("backward_rows", params, "backward_rows<Spec, Config>", true) +
                 function("backward", params, "backward<Spec, Config>", true) +
                 function("backward_dq", params, "backward_dq<Spec, Config>") +
                 (has_gradients(spec) ? function("backward_tables", params, "backward_tables") : "");
  for (const char* name : {"flashjit_backward_rows", "flashjit_backward"})
    source.steps.push_back({.function = name,
                            .scratch = cpu_backward_scratch(spec, source.target, source.config),
                            .params = type});
  source.steps.push_back({.function = "flashjit_backward_dq", .params = type});
  if (has_gradients(spec)) source.steps.push_back({.function = "flashjit_backward_tables", .params = type});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::backward,
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

}  // namespace flashjit::backward_cpu
