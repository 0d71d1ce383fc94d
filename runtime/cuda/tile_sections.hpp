// The order of tiles (templates/cuda/tile_order.cuh, and tile_schedule.cuh's TileOrder::sections): how many
// heads belong together.
#pragma once

#include <cstdint>

namespace flashjit::cuda {

struct TileSections {
  int heads;   // of a section; the last one may have fewer
  int rounds;  // of a persistent grid that a section takes before the next begins
};

// For `heads` heads of `tiles` tiles each, of which `blocks` are computed at a time, where a head's K and V
// are `bytes_per_head` of the cache's. All counts are positive.
TileSections tile_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head,
                           std::int64_t cache_bytes);

}  // namespace flashjit::cuda
