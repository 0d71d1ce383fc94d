// make_block_lists on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/block_lists_params.h"

namespace flashjit::block_lists_cpu {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "mask",    "varlen", "deterministic",
                                       "tables",     "scalars", "config"};
constexpr std::string_view choices[] = {"num_warps"};

void render(const AttentionSpec& spec, KernelSource& source) {
  const ParamsType params = params_of<device::BlockListsParams>(spec);
  const auto step = [&](const std::string& name) {
    source.text += "extern \"C\" void flashjit_" + name + "_blocks(const " + params.text +
                   "* params, i64 begin, i64 end, void*) {\n  BlockListsCpu<Spec>::" + name +
                   "(*params, begin, end);\n}\n";
    source.steps.push_back({.function = "flashjit_" + name + "_blocks", .params = params});
  };
  source.text += include_lines("cpu/block_lists.h", spec) + "\n" +
                 structs(spec, "BlockListsCpuSpec", params.text, "", choices, source.config, "");
  step("find");
  source.text += "\n";
  step("write");
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::make_block_lists,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .masks = all_masks,
    .choices = choices,
    .render = render,
};

}  // namespace flashjit::block_lists_cpu
