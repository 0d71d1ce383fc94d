// Decode by mma.sync on every GPU from sm_80 up: block_m query rows of one key/value head against the keys of
// a block's share, then a merge of the tiles that several blocks share.
#include <algorithm>
#include <span>
#include <vector>

#include "codegen/families/decode_cuda.hpp"
#include "codegen/families/decode_kernels.hpp"
#include "codegen/families/kernel_text.hpp"
#include "codegen/families/params_type.hpp"
#include "codegen/families/refusals.hpp"
#include "shared/decode_cuda_layout.h"
#include "shared/decode_cuda_params.h"

namespace flashjit::mma_decode {
namespace {

// A thread's registers if a multiprocessor holds so many warps: each of its four schedulers has 512.
int registers_of(int warps) {
  return std::min(512 / ((warps + 3) / 4) / 8 * 8, 255);
}

bool has_registers_for_32_keys(const AttentionSpec& spec) {
  return std::max(spec.head_dim, spec.head_dim_v) <= 128;
}

int invariant_block_n(const AttentionSpec& spec) {
  return has_registers_for_32_keys(spec) ? 32 : 16;
}

std::string function_text(const AttentionSpec& spec, const std::string& kernel, int threads, int blocks) {
  const std::string params = params_of<device::CudaDecodeParams>(spec).text;
  return "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(threads) + ", " +
         std::to_string(blocks) + R"()
    flashjit_decode(const __grid_constant__ )" +
         params + " params) {\n" + (spec.append ? "  griddepcontrol_wait();\n" : "") + "  " + kernel +
         R"(<Spec, Config>(params);
}

extern "C" __global__ void __launch_bounds__()" +
         std::to_string(device::decode_merge_threads) + R"()
    flashjit_decode_merge(const __grid_constant__ )" +
         params + R"( params) {
  )" + kernel +
         R"(_merge<Spec, Config>(params);
}
)";
}

}  // namespace

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (config.num_warps < 4 || config.num_warps > 16 || config.num_warps % 4 != 0)
    return wrong("num_warps", config.num_warps, "is not 4, 8, 12 or 16");
  if (config.num_stages < 1 || config.num_stages > 4)
    return wrong("num_stages", config.num_stages, "is not 1 to 4");
  if (config.block_m != 16 && config.block_m != 32 && config.block_m != 64)
    return wrong("block_m", config.block_m, "is not 16, 32 or 64");
  if (config.block_n != 16 && config.block_n != 32)
    return wrong("block_n", config.block_n, "is not 16 or 32");
  const device::CudaDecodeLayout layout = cuda_decode_layout(spec, config);
  if (config.num_warps == 16 && !layout.score_bytes)
    return wrong("num_warps", config.num_warps, "is for 8-bit keys whose values have more than 256 columns");
  if (layout.consumers % layout.warps_of_group() != 0) {
    return "block_m " + std::to_string(config.block_m) + " takes " + std::to_string(layout.warps_of_group()) +
           " computing warps, num_warps " + std::to_string(config.num_warps) + " has " +
           std::to_string(layout.consumers);
  }
  if (spec.batch_invariant) {
    const int block_n = invariant_block_n(spec), streams = decode_streams(spec);
    if (config.block_n != block_n || streams % layout.groups != 0)
      return "batch_invariant fixes the order of sums: blocks of " + std::to_string(block_n) +
             " keys, which groups of warps take from " + std::to_string(streams) + " streams; block_m " +
             std::to_string(config.block_m) + ", block_n " + std::to_string(config.block_n) +
             " and num_warps " + std::to_string(config.num_warps) +
             " make groups: " + std::to_string(layout.groups);
  }
  return too_much_shared_memory(config, {"block_m", "block_n", "num_stages", "num_warps"}, layout.end,
                                target);
}

ConfigAxes axes(const AttentionSpec& spec, const Target&) {
  ConfigAxes axes{
      .block_m = {16, 32, 64}, .block_n = {16, 32}, .num_stages = {1, 2, 3}, .num_warps = {4, 8, 12}};
  if (spec.kv_dtype && spec.head_dim_v > 256) axes.num_warps.push_back(16);
  return axes;
}

// Found by compiling: a thread has no registers for more.
std::string futility(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const device::CudaDecodeLayout layout = cuda_decode_layout(spec, config);
  // Registers for everything but scores, output and Q. Scales of each key take more beside a second tile of
  // rows. Few masks and scores leave 16 warps enough.
  const bool scales_of_keys = spec.kv_scale == KvScale::token_head;
  const bool plain =
      std::ranges::all_of(spec.mask, [](const Mask& m) { return std::holds_alternative<CausalMask>(m); }) &&
      spec.score.empty() && !spec.offsets && !scales_of_keys;
  const int others = !spec.kv_dtype || (scales_of_keys && layout.m_tiles > 1) ? 64
                     : config.num_warps == 16 && plain                        ? 48
                                                                              : 56;
  const int held =
      layout.accumulators() + layout.m_tiles * config.block_n / 2 + layout.q_registers(spec.head_dim);
  const int registers = registers_of(layout.resident_blocks(target.max_shared_memory()) * config.num_warps);
  if (held + others > registers) {
    return "a thread would hold " + std::to_string(held) + " numbers and have " + std::to_string(registers) +
           " registers; too few are left for everything else";
  }
  if (config.block_n == 32 && !has_registers_for_32_keys(spec))
    return "with blocks of 32 keys and a head dimension above 128 the compiler runs out of registers";
  return {};
}

// The smallest tile that has all rows, else the largest one; of each the first config that fits.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  struct Rest {
    int block_n, num_stages, num_warps;
  };
  constexpr Rest few_rows[] = {{32, 2, 8}, {16, 2, 12}, {16, 2, 8}, {16, 1, 8},
                               {16, 3, 4}, {16, 2, 4},  {16, 1, 4}};
  // 8-bit keys take more instructions a byte: as many warps as there can be compute. Blocks of 32 keys take a
  // fifth less than those of 16. Measured on an H200 (tests/bench/decode.md): 0.87 of the time in pages of 16
  // with scales of each token, 0.96 with one of a tensor.
  // Wide heads: three groups of warps, since each waits for its own products most of the time.
  constexpr Rest few_rows_of_8_bits[] = {{16, 3, 16}, {32, 2, 12}, {16, 3, 12}, {16, 2, 12}, {32, 2, 8},
                                         {16, 2, 8},  {16, 1, 8},  {16, 3, 4},  {16, 2, 4},  {16, 1, 4}};
  // Rows of one page are copied at a fifth of the instructions: blocks that lie in one page.
  constexpr Rest small_pages[] = {{16, 2, 8}, {16, 1, 8}, {16, 3, 4}, {16, 2, 4}, {16, 1, 4}};
  constexpr Rest many_rows[] = {{32, 2, 8}, {16, 2, 8}, {16, 1, 8}, {16, 2, 12},
                                {16, 3, 4}, {16, 2, 4}, {16, 1, 4}};
  constexpr int sizes[] = {16, 32, 64};
  const std::int64_t rows =
      std::int64_t{std::max(shape.seqlen_q, 1)} * shape.num_heads_q / std::max(shape.num_heads_kv, 1);
  std::vector<int> candidates;
  for (const int block_m : sizes)
    if (block_m >= rows) candidates.push_back(block_m);
  for (const int block_m : {64, 32, 16})
    if (block_m < rows) candidates.push_back(block_m);
  for (const int block_m : candidates) {
    const bool half_blocks = shape.page_size >= 16 && shape.page_size % 32 != 0;
    const std::span<const Rest> rests = block_m > 16    ? std::span<const Rest>(many_rows)
                                        : spec.kv_dtype ? std::span<const Rest>(few_rows_of_8_bits)
                                        : half_blocks   ? std::span<const Rest>(small_pages)
                                                        : std::span<const Rest>(few_rows);
    for (const Rest& rest : rests) {
      const int block_n = spec.batch_invariant ? invariant_block_n(spec) : rest.block_n;
      const KernelConfig config{block_m, block_n, rest.num_stages, rest.num_warps};
      if (misfit(spec, target, config).empty() && futility(spec, target, config).empty()) return config;
    }
  }
  return {16, 16, 1, 4};
}

void render_kernel(const AttentionSpec& spec, const char* header, const char* kernel, KernelSource& source) {
  const KernelConfig& config = source.config;
  const device::CudaDecodeLayout layout = cuda_decode_layout(spec, config);
  const int threads = config.num_warps * 32;
  const ParamsType params = params_of<device::CudaDecodeParams>(spec);
  source.text +=
      include_lines(header, spec) + "#pragma nv_hdrstop\n\n" +
      structs(spec, "DecodeCudaSpec", params.text, "", choices, config, "") +
      function_text(spec, kernel, threads, layout.resident_blocks(source.target.max_shared_memory()));
  source.steps.push_back(
      {.function = "flashjit_decode", .threads = threads, .shared_memory = layout.end, .params = params});
  source.steps.push_back({.function = "flashjit_decode_merge",
                          .threads = device::decode_merge_threads,
                          .shared_memory = device::decode_merge_shared,
                          .params = params});
  add_append_step(spec, source);
}

void render(const AttentionSpec& spec, KernelSource& source) {
  render_kernel(spec, spec.kv_dtype ? "cuda/decode_quantised.cuh" : "cuda/decode_merge.cuh", "decode",
                source);
  // At its default level ptxas loads operands early until the registers overflow.
  source.options.push_back("--ptxas-options=-O1");
}

}  // namespace flashjit::mma_decode

namespace flashjit::decode_cuda {

extern constinit const KernelFamily family = {
    .op = Operation::decode,
    .on = Target::Family::cuda,
    .head_dim = heads_to_576,
    .dtypes = two_byte_dtypes,
    .fields = mma_decode::fields,
    .masks = mma_decode::masks,
    .refusal = no_ds_mla_by_mma,
    .choices = mma_decode::choices,
    .misfit = mma_decode::misfit,
    .axes = mma_decode::axes,
    .futility = mma_decode::futility,
    .preferred = mma_decode::preferred,
    .render = mma_decode::render,
};

}  // namespace flashjit::decode_cuda
