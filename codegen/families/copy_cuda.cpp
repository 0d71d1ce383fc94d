// copy_kv on every GPU from sm_80 up: a thread copies a piece of a row of K and one of V, of 16 bytes each.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/copy_params.h"

namespace flashjit::copy_cuda {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "v_in_k",   "deterministic",
                                       "kv_dtype",   "kv_scale", "config"};
constexpr std::string_view choices[] = {"num_warps"};

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {1}, .num_warps = {2, 4, 8}};
}

KernelConfig preferred(const AttentionSpec&, const Target&, const Shape&) {
  return {.num_warps = 4};
}

void render(const AttentionSpec& spec, KernelSource& source) {
  source.text += include_lines("cuda/copy.cuh", spec) + "#pragma nv_hdrstop\n\n" +
                 structs(spec, "CopyCudaSpec", "", "", choices, source.config, "");
  const auto step = [&](const std::string& function) {
    source.text +=
        "extern \"C\" __global__ void __launch_bounds__(Config::num_warps * 32)\n    " + function +
        "(const __grid_constant__ CudaCopyParams params) {\n  copy_rows<Spec, Config>(params);\n}\n";
    source.steps.push_back({.function = function,
                            .threads = source.config.num_warps * 32,
                            .params = params_of<device::CudaCopyParams>({})});
  };
  step("flashjit_gather");
  source.text += "\n";
  step("flashjit_copy");
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::copy_kv,
    .on = Target::Family::cuda,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::copy_cuda
