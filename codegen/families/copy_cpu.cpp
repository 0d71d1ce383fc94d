// copy_kv on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/copy_params.h"

namespace flashjit::copy_cpu {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "v_in_k",   "deterministic",
                                       "kv_dtype",   "kv_scale", "config"};
constexpr std::string_view choices[] = {"num_warps"};

void render(const AttentionSpec& spec, KernelSource& source) {
  source.text += include_lines("cpu/copy.h", spec) + "\n" +
                 structs(spec, "CopyCpuSpec", "", "", choices, source.config, "");
  const auto step = [&](const std::string& function) {
    source.text +=
        "extern \"C\" void " + function +
        "(const CopyParams* params, i64 begin, i64 end, void*) {\n  copy_rows<Spec>(*params, begin, "
        "end);\n}\n";
    source.steps.push_back({.function = function, .params = params_of<device::CopyParams>({})});
  };
  step("flashjit_gather");
  source.text += "\n";
  step("flashjit_copy");
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::copy_kv,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .render = render,
};

}  // namespace flashjit::copy_cpu
