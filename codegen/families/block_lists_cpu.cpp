// make_block_lists on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"

namespace flashjit {
namespace {

bool serves(const Target& target) {
  return !target.is_cuda();
}

constexpr std::string_view dtypes[] = {"bf16", "fp16", "fp32"};
constexpr std::string_view fields[] = {"head_dim_v", "mask",    "varlen", "deterministic",
                                       "tables",     "scalars", "config"};
constexpr std::string_view masks[] = {CausalMask::kind,      SlidingWindowMask::kind, PaddingMask::kind,
                                      BlockSparseMask::kind, TreeMask::kind,          FormulaMask::kind};
constexpr std::string_view choices[] = {"num_warps"};

std::string misfit(const AttentionSpec&, const Target&, const KernelConfig& config) {
  if (config.num_warps == 1) return {};
  return "num_warps " + std::to_string(config.num_warps) + " is not 1, as it must be on a CPU";
}

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {1}, .num_warps = {1}};
}

std::string futility(const AttentionSpec&, const Target&, const KernelConfig&) {
  return {};
}

KernelConfig preferred(const AttentionSpec&, const Target&, const Shape&) {
  return {.num_warps = 1};
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const std::string params = with_features("BlockListsParams", spec);
  const auto step = [&](const std::string& name) {
    source.text += "extern \"C\" void flashjit_" + name + "_blocks(const " + params +
                   "* params, i64 begin, i64 end, void*) {\n  BlockListsCpu<Spec>::" + name +
                   "(*params, begin, end);\n}\n";
    source.steps.push_back({.function = "flashjit_" + name + "_blocks"});
  };
  source.text += include_lines("cpu/block_lists.h", spec) + "\n" +
                 structs(spec, "BlockListsCpuSpec", params, "", choices, source.config, "");
  step("find");
  source.text += "\n";
  step("write");
}

}  // namespace

extern constinit const KernelFamily block_lists_cpu = {
    .op = Operation::make_block_lists,
    .serves = serves,
    .dtypes = dtypes,
    .fields = fields,
    .masks = masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit
