// append_kv on CPUs.
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "shared/append_params.h"

namespace flashjit::append_cpu {
namespace {

constexpr std::string_view fields[] = {"head_dim_v", "v_in_k",   "varlen", "paged", "deterministic",
                                       "kv_dtype",   "kv_scale", "rotary", "config"};
constexpr std::string_view choices[] = {"num_warps"};

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
)",
    ds_mla_text[] =
        R"(extern "C" void flashjit_append(const AppendDsMla<Spec>::Params* params, i64 begin, i64 end, void*) {
  append_ds_mla<Spec>(*params, begin, end);
}
)";

void render(const AttentionSpec& spec, KernelSource& source) {
  const bool quantised = spec.has_kv_scales();
  source.text += include_lines(append_header(true, spec), spec) + "\n" +
                 structs(spec, quantised ? "AppendQuantisedCpuSpec" : "AppendCpuSpec", "", "", choices,
                         source.config, "") +
                 (quantised       ? quantised_text
                  : spec.kv_dtype ? ds_mla_text
                                  : function_text);
  source.steps.push_back(
      {.function = "flashjit_append", .params = params_of_append<device::AppendParams>(spec, false)});
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::append_kv,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .choices = choices,
    .render = render,
};

}  // namespace flashjit::append_cpu
