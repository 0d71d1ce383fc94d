#include "runtime/cuda/tile_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "codegen/mask_rules.hpp"
#include "runtime/cuda/tile_sections.hpp"

namespace flashjit::cuda {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int packed_heads(int group, int seqlen_q, int block_m) {
  const auto tiles = [&](int heads) { return group / heads * ceil_div(seqlen_q, block_m / heads); };
  int best = 1;
  for (int heads = 2; heads <= std::min(group, block_m); ++heads)
    if (group % heads == 0 && tiles(heads) < tiles(best)) best = heads;
  return best;
}

unsigned plan_tiles(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                    int multiprocessors, device::ForwardParams& p) {
  p.packed_heads =
      config.pack_gqa ? packed_heads(p.num_heads_q / p.num_heads_kv, p.seqlen_q, config.block_m) : 1;
  const int heads_q = p.num_heads_q / p.packed_heads;  // those of a tile are one
  const std::int64_t heads = std::int64_t{p.batch} * heads_q;
  const std::int64_t tiles = ceil_div(p.seqlen_q, config.block_m / p.packed_heads);
  constexpr std::int64_t max_grid = std::numeric_limits<std::int32_t>::max();
  if (heads > max_grid / tiles) {
    throw Error(ErrorCode::invalid_argument,
                "batch " + std::to_string(p.batch) + " x num_heads_q " + std::to_string(heads_q) + " x " +
                    std::to_string(tiles) + " tiles of " + std::to_string(config.block_m) +
                    " query rows: a launch has at most 2147483647 blocks; split the batch");
  }
  if (!target.specific || uneven_on_device(spec.mask, spec.varlen))
    return static_cast<unsigned>(heads * tiles);
  // Persistent: a block for every multiprocessor, as far as there is work.
  const auto grid = static_cast<int>(std::min<std::int64_t>(heads * tiles, multiprocessors));
  if (config.tile_order == TileOrder::sections) {
    const std::int64_t bytes_of_all_heads =
        std::int64_t{p.seqlen_k} * (spec.head_dim + spec.head_dim_v) * 2 * p.num_heads_kv;
    const TileSections sections =
        tile_sections(static_cast<int>(heads), static_cast<int>(tiles), grid, bytes_of_all_heads / heads_q);
    p.section_heads = sections.heads;
    p.section_rounds = sections.rounds;
  }
  return static_cast<unsigned>(grid);
}

}  // namespace flashjit::cuda
