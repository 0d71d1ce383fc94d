#include "runtime/cuda/tile_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "runtime/cuda/tile_sections.hpp"
#include "templates/shared/tile_waves.h"

namespace flashjit::cuda {
namespace {

// What K and V of a section may take of the L2: of 50 MB, most of which others' on their way through leave
// alone, and of an A100's 40, which are two halves.
constexpr std::int64_t l2_of_h100 = 32 << 20, l2_of_others = 16 << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

int packed_heads(int group, int seqlen_q, int block_m) {
  const auto tiles = [&](int heads) { return group / heads * ceil_div(seqlen_q, block_m / heads); };
  const int most = std::min(group, block_m);
  std::int64_t fewest = tiles(1);
  for (int heads = 2; heads <= most; ++heads)
    if (group % heads == 0) fewest = std::min(fewest, tiles(heads));
  int heads = 1;
  while (group % heads != 0 || 16 * tiles(heads) > 17 * fewest) ++heads;
  return heads;
}

Grid plan_tiles(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                int multiprocessors, device::ForwardParams& p) {
  p.packed_heads =
      config.pack_gqa ? packed_heads(p.num_heads_q / p.num_heads_kv, p.seqlen_q, config.block_m) : 1;
  p.packed_heads_inverse = static_cast<device::u32>(ceil_div(1 << 16, p.packed_heads));
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
  // sm_90a's are persistent: a block for every multiprocessor as far as there is work.
  const std::int64_t at_a_time = std::min<std::int64_t>(heads * tiles, multiprocessors);
  if (!target.arch_specific || config.tile_order == TileOrder::sections) {
    const std::int64_t bytes_of_kv_head = std::int64_t{p.seqlen_k} * (spec.head_dim + spec.head_dim_v) * 2;
    const TileSections sections = tile_sections(
        static_cast<int>(heads), static_cast<int>(tiles), static_cast<int>(at_a_time),
        bytes_of_kv_head / (heads_q / p.num_heads_kv), target.arch_specific ? l2_of_h100 : l2_of_others);
    p.section_heads = sections.heads;
    p.section_rounds = sections.rounds;
  }
  if (!target.arch_specific) return {static_cast<unsigned>(heads * tiles)};
  const auto blocks = static_cast<unsigned>(at_a_time);
  if (config.tile_order != TileOrder::waves) return {blocks};
  return {blocks, device::count_waves(static_cast<device::u32>(ceil_div(heads * tiles, at_a_time)))};
}

}  // namespace flashjit::cuda
