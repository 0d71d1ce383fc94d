// Decode on CPUs: a tile is at most block_m query rows against block_n keys in one thread's scratch.
#include <algorithm>

#include "codegen/families/kernel_family.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "shared/decode_cpu_params.h"
#include "shared/decode_layout.h"

namespace flashjit::decode_cpu {
namespace {

constexpr std::string_view fields[] = {
    "head_dim_v",      "v_in_k",  "mask",     "lse",      "varlen", "paged",  "deterministic",
    "batch_invariant", "o_dtype", "kv_dtype", "kv_scale", "score",  "tables", "scalars",
    "sink_logits",     "precise", "append",   "rotary",   "config", "offsets"};
constexpr auto masks = masks_without<PaddingMask, BlockSparseMask>;
constexpr std::string_view choices[] = {"block_m", "block_n", "num_stages", "num_warps"};

constexpr int usual_block_n = 64;  // with batch_invariant the only one: it orders the sums of a row

int scratch_of(const AttentionSpec& spec, const KernelConfig& config) {
  return device::cpu_decode_scratch(spec.head_dim, spec.head_dim_v, config.block_m, config.block_n,
                                    spec.batch_invariant, spec.has_kv_scales());
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (std::string why = not_of_cpus(config, {"block_m", "block_n"}, 16); !why.empty()) return why;
  if (spec.batch_invariant && config.block_n != usual_block_n) {
    return "batch_invariant fixes the order of sums: by blocks of " + std::to_string(usual_block_n) +
           " keys, not of " + std::to_string(config.block_n) + " as block_n says";
  }
  return too_much_scratch(config, {"block_m", "block_n"}, scratch_of(spec, config), target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target&) {
  ConfigAxes axes{
      .block_m = {64, 256}, .block_n = {32, usual_block_n, 128, 256}, .num_stages = {1}, .num_warps = {1}};
  if (spec.batch_invariant) axes.block_n = {usual_block_n};
  return axes;
}

// A tile holds all query heads of a key/value head. More than 256 make several tiles: so many rows take
// longer to compute than their keys to read. The widest heads leave scratch for 64.
KernelConfig preferred(const AttentionSpec& spec, const Target&, const Shape& shape) {
  const int group = shape.num_heads_q / std::max(shape.num_heads_kv, 1);
  const KernelConfig few{.block_m = 64, .block_n = usual_block_n, .num_stages = 1, .num_warps = 1};
  KernelConfig many = few;
  many.block_m = 256;
  return group <= 64 || scratch_of(spec, many) > largest_scratch ? few : many;
}

std::string function_text(const AttentionSpec& spec) {
  return R"(extern "C" void flashjit_decode(const )" + params_of<device::CpuDecodeParams>(spec).text +
         R"(* params, i64 begin, i64 end, void* scratch) {
  decode<Spec, Config>(*params, begin, end, scratch);
}
)";
}

void render(const AttentionSpec& spec, KernelSource& source) {
  source.text +=
      include_lines(spec.kv_dtype == DType::fp8_ds_mla ? "cpu/decode_ds_mla.h" : "cpu/decode.h", spec) +
      "\n" +
      structs(spec, "DecodeCpuSpec", params_of<device::CpuDecodeParams>(spec).text, "", choices,
              source.config, "") +
      function_text(spec);
  source.steps.push_back({.function = "flashjit_decode",
                          .scratch = scratch_of(spec, source.config),
                          .params = params_of<device::CpuDecodeParams>(spec)});
  add_append_step(spec, source);
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::decode,
    .on = Target::Family::cpu,
    .head_dim = heads_to_1024,
    .dtypes = all_dtypes,
    .fields = fields,
    .masks = masks,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::decode_cpu
