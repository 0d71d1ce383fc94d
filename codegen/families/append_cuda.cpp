// append_kv on every GPU from sm_80 up: a thread copies two pieces of a row, of 16 bytes each.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/append_params.h"

namespace flashjit::append_cuda {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "v_in_k",   "varlen", "paged", "deterministic",
                                       "kv_dtype",   "kv_scale", "rotary", "config"};
constexpr std::string_view choices[] = {"num_warps"};

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {1}, .num_warps = {2, 4, 8}};
}

KernelConfig preferred(const AttentionSpec&, const Target&, const Shape&) {
  return {.num_warps = 4};
}

constexpr char function_text[] =
    R"(extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_append(const __grid_constant__ Append<Spec, Config>::Params params) {
  append<Spec, Config>(params);
}
)",
               quantised_text[] =
                   R"(
    flashjit_append(const __grid_constant__ AppendQuantised<Spec, Config>::Params params) {
  append_quantised<Spec, Config>(params);
}
)";

// Into 8-bit caches, with pairs in pieces of two columns, ptxas spills on sm_80 to fit into 32 registers,
// unless it is told that one block is enough.
std::string quantised_function(const AttentionSpec& spec) {
  const bool narrow = spec.rotary && spec.rotary->style == RotaryStyle::half &&
                      spec.rotary->columns(spec.head_dim) / 2 % 4 == 2;
  return std::string(R"(extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)") +
         (narrow ? ", 1)" : ")") + quantised_text;
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const bool quantised = spec.kv_dtype.has_value();
  source.text += include_lines(append_header(false, spec), spec) + "#pragma nv_hdrstop\n\n" +
                 structs(spec, quantised ? "AppendQuantisedCudaSpec" : "AppendCudaSpec", "", "", choices,
                         source.config, "") +
                 (quantised ? quantised_function(spec) : function_text);
  source.steps.push_back({.function = "flashjit_append",
                          .threads = source.config.num_warps * 32,
                          .params = params_of_append<device::CudaAppendParams>(spec, false)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::append_kv,
    .on = Target::Family::cuda,
    .head_dim = heads_to_576,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::append_cuda
