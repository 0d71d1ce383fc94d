// make_block_lists on every GPU from sm_80 up.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "templates/shared/block_lists_params.h"

namespace flashjit::block_lists_cuda {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "mask",    "varlen", "deterministic",
                                       "tables",     "scalars", "config"};
constexpr std::string_view choices[] = {"num_warps"};

ConfigAxes axes(const AttentionSpec&, const Target&) {
  return {.block_m = {0}, .block_n = {0}, .num_stages = {1}, .num_warps = {4, 8, 16}};
}

// One batch entry of 16,384 rows is 128 lists of 128 rows: about as many as a GPU has multiprocessors, so
// each takes many warps.
KernelConfig preferred(const AttentionSpec&, const Target&, const Shape&) {
  return {.num_warps = 16};
}

void render(const AttentionSpec& spec, KernelSource& source) {
  const ParamsType params = params_of<device::BlockListsParams>(spec);
  const auto step = [&](const std::string& name, int warps, int shared_memory) {
    const int threads = warps * 32;
    source.text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) + ", 2" +
                   ")\n    flashjit_" + name + "_blocks(const __grid_constant__ " + params.text +
                   " params) {\n  " + name + "_blocks<Spec, Config>(params);\n}\n";
    source.steps.push_back({.function = "flashjit_" + name + "_blocks",
                            .threads = threads,
                            .shared_memory = shared_memory,
                            .params = params});
  };
  source.text += include_lines("cuda/block_lists.cuh", spec) + "#pragma nv_hdrstop\n\n" +
                 structs(spec, "BlockListsCudaSpec", params.text, "", choices, source.config, "");
  const int warps = source.config.num_warps;
  step("find", warps, warps * static_cast<int>(sizeof(device::ListCounts)));
  source.text += "\n";
  step("write", device::block_lists_write_warps, 0);
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::make_block_lists,
    .on = Target::Family::cuda,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::block_lists_cuda
