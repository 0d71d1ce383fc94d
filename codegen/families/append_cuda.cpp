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
    R"()
    flashjit_append(const __grid_constant__ Append<Spec, Config>::Params params) {
  append<Spec, Config>(params);
}
)",
               quantised_text[] =
                   R"()
    flashjit_append(const __grid_constant__ AppendQuantised<Spec, Config>::Params params) {
  append_quantised<Spec, Config>(params);
}
)";

// Into 8-bit caches, with halves of pairs, ptxas spills to have more blocks resident, unless it is told how
// many are enough: on sm_80 with pieces of two columns, and where a multiprocessor holds 48 warps with packed
// rows whose scales are computed. Found by compiling.
std::string enough_blocks(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!spec.rotary || spec.rotary->style != RotaryStyle::half) return "";
  if (spec.rotary->columns(spec.head_dim) / 2 % 4 == 2) return ", 1";
  const bool few_warps = target.level == 86 || target.level == 89;
  const bool computes_scales = spec.kv_scale == KvScale::token_head;
  return few_warps && computes_scales && spec.varlen ? ", " + std::to_string(32 / config.num_warps) : "";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const bool quantised = spec.kv_dtype.has_value();
  source.text +=
      include_lines(append_header(false, spec), spec) + "#pragma nv_hdrstop\n\n" +
      structs(spec, quantised ? "AppendQuantisedCudaSpec" : "AppendCudaSpec", "", "", choices, source.config,
              "") +
      R"(extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)" +
      (quantised ? enough_blocks(spec, source.target, source.config) + quantised_text : function_text);
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
