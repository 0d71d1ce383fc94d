// append_kv on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"

namespace flashjit {
namespace {

bool serves(const Target& target) {
  return !target.is_cuda();
}

constexpr std::string_view dtypes[] = {"bf16", "fp16", "fp32"};
constexpr std::string_view fields[] = {"head_dim_v", "varlen",   "paged",  "deterministic",
                                       "kv_dtype",   "kv_scale", "rotary", "config"};
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

constexpr char
    function_text[] =
        R"(extern "C" void flashjit_append(const Append<Spec>::Params* params, i64 begin, i64 end, void*) {
  append<Spec>(*params, begin, end);
}
)",
    quantised_text[] =
        R"(extern "C" void flashjit_append(const AppendQuantised<Spec>::Params* params, i64 begin, i64 end,
                                void*) {
  append_quantised<Spec>(*params, begin, end);
}
)";

void render(const AttentionSpec& spec, KernelSource& source) {
  const bool quantised = spec.kv_dtype.has_value();
  source.text += include_lines(append_header(true, spec), spec) + "\n" +
                 structs(spec, quantised ? "AppendQuantisedCpuSpec" : "AppendCpuSpec", "", "", choices,
                         source.config, "") +
                 (quantised ? quantised_text : function_text);
  source.steps.push_back({.function = "flashjit_append"});
}

}  // namespace

extern constinit const KernelFamily append_cpu = {
    .op = Operation::append_kv,
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
