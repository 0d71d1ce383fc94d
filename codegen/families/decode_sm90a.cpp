// Decode on sm_90a: the kernel by mma.sync, which divides the keys, or for many query rows the forward's; of
// few rows of 8-bit latents one with keys as rows of the products.
#include <algorithm>

#include "codegen/families/decode_cuda.hpp"
#include "codegen/families/decode_kernels.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/refusals.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit::forward_sm90a {
extern const KernelFamily family;
}

namespace flashjit::decode_sm90a {
namespace {

constexpr std::string_view choices[] = {"block_m",        "block_n",   "num_stages", "num_warps",
                                        "q_in_registers", "ping_pong", "tile_order", "pack_gqa"};

// The forward that computes a decode. A padding mask has the lengths of contiguous caches.
AttentionSpec forward_of(const AttentionSpec& spec) {
  AttentionSpec forward = spec;
  forward.op = Operation::forward;
  if (!spec.paged) forward.mask.push_back(PaddingMask{});
  return forward;
}

constexpr KernelConfig keys_as_rows{16, 64, 2, 12};

std::string misfit_of_keys_as_rows(const AttentionSpec& spec, const Target& target,
                                   const KernelConfig& config) {
  if (config.block_n != keys_as_rows.block_n)
    return wrong("block_n", config.block_n, "with block_m 16 is not 16, 32 or 64");
  if (config.num_warps != keys_as_rows.num_warps)
    return wrong("num_warps", config.num_warps, "with block_m 16 and block_n 64 is not 12");
  if (config.num_stages < 1 || config.num_stages > 4)
    return wrong("num_stages", config.num_stages, "is not 1 to 4");
  return too_much_shared_memory(config, {"num_stages"}, cuda_decode_layout(spec, config).end, target);
}

std::string refusal(const AttentionSpec& spec, const Target& target) {
  return *why_no_forward(spec) ? no_ds_mla_by_mma(spec, target) : std::string();
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (decodes_by_forward(spec, target, config)) {
    if (const std::string why = why_no_forward(spec); !why.empty())
      return "block_n " + std::to_string(config.block_n) + ": " + why + "; block_n 16 and 32 work";
    return forward_sm90a::family.misfit(forward_of(spec), target, config);
  }
  const KernelConfig unset;
  if (config.q_in_registers || config.ping_pong || config.pack_gqa || config.tile_order != unset.tile_order)
    return "q_in_registers, ping_pong, tile_order and pack_gqa are for the kernel of the forward";
  if (decodes_by_keys_as_rows(spec, target, config)) return misfit_of_keys_as_rows(spec, target, config);
  return mma_decode::misfit(spec, target, config);
}

void add_values(std::vector<int>& to, const std::vector<int>& more) {
  to.insert(to.end(), more.begin(), more.end());
  std::sort(to.begin(), to.end());
  to.erase(std::unique(to.begin(), to.end()), to.end());
}

ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes = mma_decode::axes(spec, target);
  if (has_keys_as_rows(spec)) add_values(axes.block_n, {keys_as_rows.block_n});
  if (*why_no_forward(spec)) return axes;
  if (has_wide_heads(spec) && !spec.kv_dtype) return forward_sm90a::family.axes(forward_of(spec), target);
  const ConfigAxes forward = forward_sm90a::family.axes(forward_of(spec), target);
  add_values(axes.block_m, forward.block_m);
  add_values(axes.block_n, forward.block_n);
  add_values(axes.num_stages, forward.num_stages);
  add_values(axes.num_warps, forward.num_warps);
  axes.q_in_registers = forward.q_in_registers;
  axes.ping_pong = forward.ping_pong;
  axes.pack_gqa = forward.pack_gqa;
  for (const TileOrder order : forward.tile_order)
    if (order != axes.tile_order.front()) axes.tile_order.push_back(order);
  return axes;
}

std::string futility(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (decodes_by_keys_as_rows(spec, target, config)) return {};
  if (!decodes_by_forward(spec, target, config)) return mma_decode::futility(spec, target, config);
  if (config.block_m == 192) return "a decode has at most 64 query rows for each head";
  return forward_sm90a::family.futility(forward_of(spec), target, config);
}

// Measured on an H200 (tests/bench/decode.md): with 64 rows of a key/value head the forward's kernel takes
// 0.77 of the time of the other, with 256 rows 0.35, if its tiles keep most multiprocessors busy.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  const std::int64_t rows =
      std::int64_t{std::max(shape.seqlen_q, 1)} * shape.num_heads_q / std::max(shape.num_heads_kv, 1);
  if (has_keys_as_rows(spec) && rows <= keys_as_rows.block_m) return keys_as_rows;
  if (*why_no_forward(spec)) return mma_decode::preferred(spec, target, shape);
  const std::int64_t heads = std::int64_t{std::max(shape.batch, 1)} * std::max(shape.num_heads_kv, 1);
  if (has_wide_heads(spec) && (!spec.has_kv_scales() || rows > 16))
    return forward_sm90a::family.preferred(forward_of(spec), target, shape);
  if (rows > 32 && !has_wide_heads(spec)) {
    const KernelConfig config = forward_sm90a::family.preferred(forward_of(spec), target, shape);
    const std::int64_t tiles = heads * ((rows + config.block_m - 1) / config.block_m);
    const std::int64_t enough = rows > 64 ? 48 : 96;
    if (tiles >= enough && decodes_by_forward(spec, target, config) && misfit(spec, target, config).empty())
      return config;
  }
  return mma_decode::preferred(spec, target, shape);
}

void render(const AttentionSpec& spec, KernelSource& source) {
  if (decodes_by_keys_as_rows(spec, source.target, source.config)) {
    mma_decode::render_kernel(spec, "cuda/decode_latents.cuh", "decode_latents", source);
    // At its default level, which is 7% faster for fp8_ds_mla, ptxas lacks up to 30 registers here.
    const auto* window = find_mask<SlidingWindowMask>(spec.mask);
    const bool formula_of_int8 = find_mask<FormulaMask>(spec.mask) && spec.kv_dtype == DType::int8;
    const bool wide = spec.head_dim_v > 512 && ((window && window->sinks) || formula_of_int8);
    if (spec.varlen || spec.offsets || reads_tables(spec) || wide)
      source.options.push_back("--ptxas-options=-O1");
    return;
  }
  if (!decodes_by_forward(spec, source.target, source.config)) return mma_decode::render(spec, source);
  forward_sm90a::family.render(forward_of(spec), source);
  add_append_step(spec, source);
}

}  // namespace

extern constinit const KernelFamily family = {
    .op = Operation::decode,
    .on = Target::Family::cuda,
    .needs = Instructions::wgmma,
    .head_dim = heads_to_576,
    .dtypes = two_byte_dtypes,
    .fields = mma_decode::fields,
    .masks = mma_decode::masks,
    .refusal = refusal,
    .choices = choices,
    .misfit = misfit,
    .axes = axes,
    .futility = futility,
    .preferred = preferred,
    .render = render,
};

}  // namespace flashjit::decode_sm90a
