// Merge on every GPU from sm_80 up: a thread has 16 bytes of each part of a row.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "shared/merge_params.h"

namespace flashjit::merge_cuda {
namespace {

constexpr std::string_view fields[] = {"head_dim_v",  "lse", "varlen", "deterministic",
                                       "parts_dtype", "sum", "config"};
// num_stages: the number of parts whose loads are in flight at once.
constexpr std::string_view choices[] = {"num_stages", "num_warps"};

// A row's threads belong to one block.
int warps_of_row(const AttentionSpec& spec) {
  const int columns = 16 / static_cast<int>(size_of(spec.parts_dtype.value_or(DType::fp32)));
  return device::ceil_div(spec.head_dim_v / columns, 32);
}

std::string misfit(const AttentionSpec& spec, const Target&, const KernelConfig& config) {
  if (config.num_warps != 2 && config.num_warps != 4 && config.num_warps != 8)
    return wrong("num_warps", config.num_warps, "is not 2, 4 or 8");
  if (const int least = warps_of_row(spec); config.num_warps < least)
    return wrong("num_warps", config.num_warps,
                 "is less than the " + std::to_string(least) + " that have a row of head_dim_v " +
                     std::to_string(spec.head_dim_v));
  if (config.num_stages != 2 && config.num_stages != 4)
    return wrong("num_stages", config.num_stages, "is not 2 or 4");
  return {};
}

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {2, 4}, .num_warps = {4, 8}};
}

// Measured on an H200. With many rows, more threads hide the
// latency of loads; with few rows, more loads in each thread do.
KernelConfig preferred(const AttentionSpec& spec, const Target&, const Shape& shape) {
  constexpr std::int64_t few = 1 << 20;
  const auto elements = product_of({shape.batch, shape.seqlen_q, shape.num_heads_q, spec.head_dim_v});
  return {.num_stages = elements && *elements <= few ? 4 : 2, .num_warps = warps_of_row(spec) > 4 ? 8 : 4};
}

// The number of warps that a multiprocessor is to hold: as
// many as registers allow without spills, found by compiling.
int resident_warps(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const bool hopper = target.str().starts_with("sm_90");
  if (size_of(spec.parts_dtype.value_or(DType::fp32)) == 2) return hopper ? 32 : 16;
  if (config.num_stages == 4) return hopper ? 32 : 16;
  // NVRTC for sm_100 spills these within 64 registers.
  const bool takes_more = spec.head_dim_v > 256 || spec.sum;
  return hopper ? 48 : takes_more ? 24 : 32;
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const int blocks = resident_warps(spec, source.target, source.config) / source.config.num_warps;
  source.text += include_lines("cuda/merge.cuh", spec) + "#pragma nv_hdrstop\n\n" +
                 structs(spec, "MergeCudaSpec", "", "", choices, source.config, "") +
                 "extern \"C\" __global__ void __launch_bounds__(Config::num_warps * 32, " +
                 std::to_string(blocks) + R"()
    flashjit_merge(const __grid_constant__ CudaMergeParams params) {
  merge<Spec, Config>(params);
}
)";
  source.steps.push_back({.function = "flashjit_merge",
                          .threads = source.config.num_warps * 32,
                          .params = params_of<device::CudaMergeParams>(spec)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::merge,
    .on = Target::Family::cuda,
    .head_dim = heads_to_576,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::merge_cuda
