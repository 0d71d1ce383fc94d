#include <algorithm>
#include <bit>
#include <string>

#include "runtime/argument_checks.hpp"
#include "runtime/arguments.hpp"
#include "runtime/cpu/decode_partition.hpp"
#include "runtime/cpu/parts.hpp"
#include "runtime/operations/operations.hpp"
#include "templates/shared/decode_cuda_layout.h"
#include "templates/shared/decode_cuda_params.h"
#include "templates/shared/decode_layout.h"

namespace flashjit {
namespace {

constexpr int most_rows = 64;  // of a sequence

struct Decode {
  struct Checked {
    device::DecodeParams params{};
    Shape shape{};
    bool empty = false;
  };

  static Checked check(const AttentionSpec& spec, Device device, const AttentionArgs& args) {
    Checked checked;
    device::DecodeParams& p = checked.params;
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
    check_data(spec, device, p, p.pages);
    checked.shape = attention.shape;
    checked.empty = attention.empty;
    return checked;
  }

  // On a GPU: partial results of the grid's blocks. The grid is the same for all shapes.
  static std::size_t workspace_bytes(const PlannedKernel& kernel, const Shape&) {
    return kernel.target.is_cuda() ? CudaWorkspace(kernel).bytes : 0;
  }

  static void plan_cuda(const PlannedKernel& kernel, const device::DecodeParams& params, void* workspace,
                        Launch& launch) {
    const CudaWorkspace room(kernel);
    const int block_m = kernel.config.block_m, group = params.num_heads_q / params.num_heads_kv;
    auto* const memory = static_cast<std::byte*>(workspace);
    StepLaunch& step = launch.add_step();
    auto& p = step.make_params<device::CudaDecodeParams>(params);
    p.head_tiles = device::ceil_div(group, block_m);
    p.tile_heads = device::ceil_div(group, p.head_tiles);
    p.tile_positions = block_m / p.tile_heads;
    p.heads_inverse = static_cast<device::u32>(device::ceil_div(1 << 16, p.tile_heads));
    p.parts_o = reinterpret_cast<float*>(memory);
    p.parts_lse = reinterpret_cast<float*>(memory + room.parts_lse);
    p.split = reinterpret_cast<device::SplitTile*>(memory + room.split);
    step.grid = {.x = room.blocks};

    constexpr int columns_of_a_thread = 4, merge_threads = 128;
    constexpr unsigned most_blocks_of_a_tile = 4;
    const int rows = merge_threads / (kernel.spec.head_dim_v / columns_of_a_thread);
    StepLaunch& merge = launch.add_step();
    merge.make_params<device::CudaDecodeParams>(p);
    merge.grid = {
        .x = room.blocks,
        .y = std::min(static_cast<unsigned>(device::ceil_div(block_m, rows)), most_blocks_of_a_tile)};
    merge.dependent = true;
  }

  static void plan_cpu(const PlannedKernel& kernel, const device::DecodeParams& params, void*,
                       Launch& launch) {
    const int group = params.num_heads_q / params.num_heads_kv;
    if (device::round_up(group, device::decode_rows_at_once) > kernel.config.block_m)
      refuse_argument("q has ", group, " heads for each of k's, more than the ", kernel.config.block_m,
                      " of the kernel's block_m: get a kernel for a shape with these heads");
    const DecodePartition cut = decode_partition(params, kernel.spec, kernel.config, kernel.parallelism);
    StepLaunch& step = launch.add_step();
    auto& p = step.make_params<device::CpuDecodeParams>(params);
    p.parts = cut.parts;
    p.heads_at_once = cut.heads_at_once;
    p.positions_at_once = cut.positions_at_once;
    Items& items = step.items;
    items.count = cut.tiles * cut.parts;
    items.pieces = std::min(cut.pieces, items.count);
    if (cut.parts == 1) return;
    // A power of two: lengths decide how many parts there are, and threads' memory seldom grows.
    items.lent_bytes = std::bit_ceil(partials_bytes(static_cast<std::size_t>(cut.tiles),
                                                    static_cast<std::size_t>(cut.parts), cut.part_bytes));
    items.lend = [](StepLaunch& lent, void* memory) {
      auto& to = lent.params_as<device::CpuDecodeParams>();
      lend_partials(lent.items, memory, to.parts, to.arrived, to.partials);
    };
  }

 private:
  // Offsets in the workspace of a GPU's launch.
  struct CudaWorkspace {
    unsigned blocks;  // of the grid
    std::size_t parts_lse, split, bytes;

    explicit CudaWorkspace(const PlannedKernel& kernel) {
      const KernelConfig& config = kernel.config;
      const device::CudaDecodeLayout layout(kernel.spec.head_dim, kernel.spec.head_dim_v, config.block_m,
                                            config.block_n, config.num_stages, config.num_warps);
      blocks = static_cast<unsigned>(kernel.parallelism *
                                     layout.resident_blocks(kernel.target.max_shared_memory()));
      const std::size_t rows = std::size_t{2} * blocks * static_cast<std::size_t>(config.block_m);
      const auto after = [](std::size_t begin, std::size_t size) { return (begin + size + 255) / 256 * 256; };
      parts_lse = after(0, rows * static_cast<std::size_t>(kernel.spec.head_dim_v) * sizeof(float));
      split = after(parts_lse, rows * sizeof(float));
      bytes = split + blocks * sizeof(device::SplitTile);
    }
  };

  static constexpr char too_many_rows[] =
      ": decode takes 1 to 64 query rows of a sequence; op forward takes more";
};

}  // namespace

const OperationRuntime decode_runtime = operation_runtime<Decode>;

}  // namespace flashjit
