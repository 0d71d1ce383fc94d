// Merge on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"

namespace flashjit {
namespace {

bool serves(const Target& target) {
  return !target.is_cuda();
}

constexpr std::string_view dtypes[] = {"bf16", "fp16", "fp32"};
constexpr std::string_view fields[] = {"head_dim_v",    "lse",         "varlen",
                                       "deterministic", "parts_dtype", "config"};
constexpr std::string_view choices[] = {"num_stages", "num_warps"};

std::string misfit(const AttentionSpec&, const Target&, const KernelConfig& config) {
  if (config.num_warps != 1 || config.num_stages != 1) {
    return "num_warps " + std::to_string(config.num_warps) + " and num_stages " +
           std::to_string(config.num_stages) + " are not 1, as they must be on a CPU";
  }
  return {};
}

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {1}, .num_warps = {1}};
}

std::string futility(const AttentionSpec&, const Target&, const KernelConfig&) {
  return {};
}

KernelConfig preferred(const AttentionSpec&, const Target&, const Shape&) {
  return {.num_stages = 1, .num_warps = 1};
}

constexpr char function_text[] =
    R"(extern "C" void flashjit_merge(const MergeParams* params, i64 begin, i64 end, void*) {
  merge<Spec>(*params, begin, end);
}
)";

void render(const AttentionSpec& spec, KernelSource& source) {
  source.text += include_lines("cpu/merge.h", spec) + "\n" +
                 structs(spec, "MergeCpuSpec", "", "", choices, source.config, "") + function_text;
  source.steps.push_back({.function = "flashjit_merge"});
}

}  // namespace

extern constinit const KernelFamily merge_cpu = {
    .op = Operation::merge,
    .serves = serves,
    .dtypes = dtypes,
    .fields = fields,
    .masks = {},
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit
