#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <variant>

#include "codegen/families/decode_kernels.hpp"
#include "runtime/arguments/append_rows.hpp"
#include "runtime/arguments/attention.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/cpu/decode_partition.hpp"
#include "runtime/cuda/tile_plan.hpp"
#include "runtime/operations/operations.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/decode_cuda_layout.h"
#include "templates/shared/decode_cuda_params.h"
#include "templates/shared/last_keys.h"

namespace flashjit {
namespace {

constexpr int most_rows = 64;  // of a sequence

struct Decode {
  struct Params {
    device::DecodeParams decode{};
    std::optional<device::FormulaParams> formulas{};
    std::optional<CheckedKvScales> kv_scales{};
    std::optional<CheckedAppend> append{};
    std::optional<device::OffsetParams> offsets{};
    AddedParams added() const {
      return {.formulas = if_any(formulas), .kv_scales = if_any(kv_scales), .offsets = if_any(offsets)};
    }
  };
  struct Checked {
    Params params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    Checked checked;
    device::DecodeParams& p = checked.params.decode;
    const CheckedAttention attention = check_attention(spec, device, args, most_rows, p);
    if (args.max_seqlen_q && *args.max_seqlen_q > most_rows)
      refuse_argument("max_seqlen_q is ", *args.max_seqlen_q, too_many_rows);
    if (!spec.varlen && p.seqlen_q > most_rows) refuse_argument("q has ", p.seqlen_q, " rows", too_many_rows);
    p.scale_log2 = attention.scale_log2;
    p.q = attention.q;
    p.k = attention.k;
    p.v = attention.v;
    p.o = attention.o;
    p.lse = attention.lse;
    p.pages = attention.pages.table;
    checked.params.formulas = check_formula_arguments(spec, device, args, p, attention.scale);
    checked.params.kv_scales = check_kv_scales(spec, device, args);
    checked.params.offsets = attention.offsets;
    check_data(spec, device, p, p.pages, attention.offsets);
    checked.shape = attention.shape;
    checked.empty = attention.empty;
    if (spec.append) check_append(spec, device, args, checked.params);
    return checked;
  }

  // On a GPU: partial results of the grid's blocks, or with batch_invariant of all parts.
  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape& shape) {
    if (!kernel.target.is_cuda()) return 0;
    if (decodes_by_forward(kernel.spec, kernel.target, kernel.config))
      return cuda::PartsWorkspace(kernel.spec, kernel.config, kernel.parallelism, shape).bytes;
    return CudaPlan(kernel, shape).bytes;
  }

  static void plan_cuda(const PlannedKernel& kernel, const Params& checked, void* workspace, Launch& launch) {
    const device::DecodeParams& params = checked.decode;
    if (checked.append) plan_cuda_append(kernel, device::append_step_warps, *checked.append, launch);
    if (decodes_by_forward(kernel.spec, kernel.target, kernel.config))
      return plan_cuda_forward(kernel, forward_of(params), params.pages, checked.added(), workspace, launch);
    const CudaPlan plan(kernel, {.batch = params.batch,
                                 .seqlen_q = params.seqlen_q,
                                 .seqlen_k = params.seqlen_k,
                                 .num_heads_q = params.num_heads_q,
                                 .num_heads_kv = params.num_heads_kv});
    auto* const memory = static_cast<std::byte*>(workspace);
    const AddedParams added = checked.added();
    StepLaunch& step = add_step(kernel, launch, "flashjit_decode");
    step.dependent = checked.append.has_value();
    auto& p = make_params<device::CudaDecodeParams>(step, params, added);
    p.group = params.num_heads_q / params.num_heads_kv;
    p.tile_heads = plan.tile_heads;
    p.tile_positions = plan.tile_positions;
    p.head_tiles = plan.head_tiles;
    p.heads_inverse = static_cast<device::u32>(device::ceil_div(1 << 16, plan.tile_heads));
    p.most_tiles = plan.most_tiles;
    p.most_parts = plan.most_parts;
    p.blocks = static_cast<int>(plan.blocks);
    p.parts_o = reinterpret_cast<float*>(memory);
    p.parts_state = reinterpret_cast<float*>(memory + plan.parts_state);
    step.grid = {.x = plan.blocks};
    if (const unsigned blocks = blocks_of_whole_tiles(kernel.spec, params, plan)) {
      step.grid.x = blocks;
      return;
    }

    // Blocks for each tile: as many as multiprocessors hold at once, and 8 at least.
    constexpr unsigned least_blocks_of_a_tile = 8;
    StepLaunch& merge = add_step(kernel, launch, "flashjit_decode_merge");
    make_params<device::CudaDecodeParams>(merge, p, added);
    const auto tiles = static_cast<unsigned>(params.batch * plan.most_tiles);
    const auto items = static_cast<unsigned>(
        p.tile_rows() * kernel.spec.head_dim_v /
        device::decode_merge_columns(kernel.spec.head_dim_v, kernel.spec.batch_invariant));
    merge.grid.x = kernel.spec.batch_invariant ? tiles : std::min(tiles, plan.blocks);
    merge.grid.y = std::min(items, std::max(8 * plan.blocks / merge.grid.x, least_blocks_of_a_tile));
    merge.dependent = true;
  }

  static void plan_cpu(const PlannedKernel& kernel, const Params& checked, void*, Launch& launch) {
    const device::DecodeParams& params = checked.decode;
    if (checked.append) plan_cpu_append(kernel, *checked.append, launch);
    set_decode_items(add_step(kernel, launch, "flashjit_decode"), params, checked.added(),
                     decode_partition(params, kernel.spec, kernel.config, kernel.parallelism), kernel.spec);
  }

 private:
  // The decode's own tensors have been checked.
  static void check_append(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                           Params& params) {
    device::DecodeParams& decode = params.decode;
    CheckedAppend& p = params.append.emplace();
    check_new_rows(spec, device, args, p);
    const Tensor &q = *args.q, &k_new = *args.k_new;
    for (int i = 0; i + 2 < q.rank; ++i) require_shape("k_new", k_new, i, q.shape[i], "as q");
    p.batch = decode.batch;
    p.cu_seqlens = decode.cu_seqlens_q;
    p.entry_rows = args.k->shape[1];
    if (spec.paged) check_append_pages(spec, device, args, p);
    p.last_keys = {decode.seqlens_k, decode.seqlen_k};
    check_conversions(spec, device, args, p);
    if (!p.rotary.heads_q) return;
    decode.q = p.rotary.q_out;
  }

  static device::ForwardParams forward_of(const device::DecodeParams& p) {
    return {p, p.scale_log2, p.q, p.k, p.v, p.o, p.lse};
  }

  // Tiles, grid and workspace of a GPU's launch.
  struct CudaPlan {
    int tile_heads, tile_positions, head_tiles;
    int most_tiles = 0, most_parts = 0;  // of a batch entry, of a tile
    unsigned blocks;                     // of the grid
    std::size_t parts_state, bytes;      // an offset in the workspace, and its size

    CudaPlan(const PlannedKernel& kernel, const Shape& shape) {
      const KernelConfig& config = kernel.config;
      const device::CudaDecodeLayout layout = cuda_decode_layout(kernel.spec, config);
      const int heads_kv = std::max(shape.num_heads_kv, 1), group = std::max(shape.num_heads_q / heads_kv, 1);
      head_tiles = (group - 1) / config.block_m + 1;  // no ceil_div: a group may be any number
      tile_heads = (group - 1) / head_tiles + 1;
      tile_positions = std::clamp(shape.seqlen_q, 1, config.block_m / tile_heads);
      const std::int64_t tiles =
          std::int64_t{device::ceil_div(std::max(shape.seqlen_q, 1), tile_positions)} * heads_kv * head_tiles;
      constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
      const bool fixed_parts = kernel.spec.batch_invariant;
      const int unit_keys = fixed_parts ? device::fixed_part_keys : config.block_n * layout.groups;
      const std::int64_t units_of_tile = shape.seqlen_k / unit_keys + 2;  // at most
      if (const auto units = product_of({shape.batch, tiles, units_of_tile}); !units || *units > most)
        refuse_argument("batch ", shape.batch, " x ", tiles, " tiles of ", config.block_m, " query rows x ",
                        units_of_tile, " steps of ", unit_keys, " keys: a launch has at most ", most,
                        "; split the batch");
      most_tiles = static_cast<int>(tiles);
      // A page table has room for whole pages.
      const int page_size = std::max(shape.page_size, 1);
      const std::int64_t keys = (std::int64_t{shape.seqlen_k} + page_size - 1) / page_size * page_size;
      most_parts = static_cast<int>(
          std::max((keys + device::fixed_part_keys - 1) / device::fixed_part_keys, std::int64_t{1}));
      blocks = static_cast<unsigned>(kernel.parallelism *
                                     layout.resident_blocks(kernel.target.max_shared_memory()));
      std::size_t rows = std::size_t{2} * blocks * static_cast<std::size_t>(config.block_m);
      std::size_t rounds = 1;
      if (fixed_parts) {
        const auto needed = product_of({shape.batch, most_tiles, most_parts, tile_heads * tile_positions});
        constexpr std::int64_t most_rows_of_parts = std::int64_t{1} << 40;
        if (!needed || *needed > most_rows_of_parts)
          refuse_argument("batch ", shape.batch, " x ", most_tiles, " tiles x ", most_parts,
                          " parts of keys: with batch_invariant a launch has at most ", most_rows_of_parts,
                          " rows of parts; split the batch");
        rows = static_cast<std::size_t>(*needed);
        rounds = static_cast<std::size_t>(decode_streams(kernel.spec) / layout.groups);
      }
      const auto after = [](std::size_t begin, std::size_t size) { return (begin + size + 255) / 256 * 256; };
      parts_state = after(0, rows * static_cast<std::size_t>(kernel.spec.head_dim_v) * sizeof(float));
      bytes = parts_state + rows * rounds * 2 * sizeof(float);
    }
  };

  // The blocks that can take equally many whole tiles each, if all tiles are known to have equally many keys
  // and few multiprocessors are left without one; else 0. Then no tile is shared, and there is no second
  // step.
  static unsigned blocks_of_whole_tiles(const AttentionSpec& spec, const device::DecodeParams& params,
                                        const CudaPlan& plan) {
    const bool alike =
        !spec.varlen && !spec.offsets && params.seqlens_k == nullptr &&
        std::ranges::all_of(spec.mask, [](const Mask& mask) {
          return std::holds_alternative<CausalMask>(mask) || std::holds_alternative<SlidingWindowMask>(mask);
        });
    if (!alike) return 0;
    const auto tiles = static_cast<unsigned>(params.batch * plan.most_tiles);
    const unsigned tiles_of_block = (tiles - 1) / plan.blocks + 1, blocks = tiles / tiles_of_block;
    constexpr unsigned idle = 32;  // at most one multiprocessor of so many
    return tiles % tiles_of_block == 0 && blocks >= plan.blocks - plan.blocks / idle ? blocks : 0;
  }

  static constexpr char too_many_rows[] =
      ": decode takes 1 to 64 query rows of a sequence; op forward takes more";
};

}  // namespace

const OperationRuntime decode_runtime = operation_runtime<Decode>;

}  // namespace flashjit
