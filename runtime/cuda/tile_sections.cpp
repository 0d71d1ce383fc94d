#include "runtime/cuda/tile_sections.hpp"

#include <algorithm>

namespace flashjit::cuda {
namespace {

std::int64_t rounded_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// The heads of a section. Sections of equal size give every block equal work, so this looks
// for a number of sections that divides the heads, near the number that fits the cache.
int section_heads(std::int64_t heads, int fitting) {
  if (fitting >= heads) return static_cast<int>(heads);
  constexpr int tries = 64;
  const std::int64_t fewest = rounded_up(2 * heads, std::int64_t{3} * fitting);
  const std::int64_t most = std::min({rounded_up(2 * heads, fitting), heads, fewest + tries});
  for (std::int64_t sections = fewest; sections <= most; ++sections) {
    if (heads % sections == 0) return static_cast<int>(heads / sections);
  }
  return fitting;
}

}  // namespace

TileSections tile_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head,
                           std::int64_t cache_bytes, int early_tiles) {
  const std::int64_t cached = cache_bytes / std::max<std::int64_t>(bytes_per_head, 1);
  const int fitting = static_cast<int>(
      std::min<std::int64_t>(std::max<std::int64_t>(cached, rounded_up(blocks, tiles)), heads));
  TileSections sections{section_heads(heads, fitting), 0};
  // A last round that leaves at most a tenth of the blocks idle is added to the others.
  sections.rounds = static_cast<int>((std::int64_t{sections.heads} * (tiles - early_tiles) + blocks / 10) /
                                     std::max(blocks, 1));
  return sections;
}

int turned_heads(int heads, int tiles, int blocks) {
  // Measured (tests/bench/log/gpu_forward_sm90a.md). Longer sequences read K and V often enough. Where
  // products take as long as reading, the last rounds have the longest tiles first, which evens out the end.
  constexpr int few_tiles = 6, some_tiles = 10, sorted_rounds = 3;
  if (tiles > some_tiles || std::int64_t{heads} * tiles <= std::int64_t{2} * blocks) return 0;
  if (tiles <= few_tiles) return heads;
  const auto sorted = static_cast<int>(rounded_up(std::int64_t{sorted_rounds} * blocks, tiles));
  return std::max(heads - sorted, 0) / blocks * blocks;
}

}  // namespace flashjit::cuda
