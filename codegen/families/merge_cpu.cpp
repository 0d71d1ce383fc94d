// Merge on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/merge_params.h"

namespace flashjit::merge_cpu {
namespace {

constexpr std::string_view fields[] = {"head_dim_v",  "lse", "varlen", "deterministic",
                                       "parts_dtype", "sum", "config"};
constexpr std::string_view choices[] = {"num_stages", "num_warps"};

constexpr char function_text[] =
    R"(extern "C" void flashjit_merge(const MergeParams* params, i64 begin, i64 end, void*) {
  merge<Spec>(*params, begin, end);
}
)";

void render(const AttentionSpec& spec, KernelSource& source) {
  source.text += include_lines("cpu/merge.h", spec) + "\n" +
                 structs(spec, "MergeCpuSpec", "", "", choices, source.config, "") + function_text;
  source.steps.push_back({.function = "flashjit_merge", .params = params_of<device::MergeParams>(spec)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::merge,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .render = render,
};

}  // namespace flashjit::merge_cpu
