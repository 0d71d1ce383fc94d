// The sections of the tile order (templates/cuda/tile_order.cuh, and
// TileOrder::sections of tile_schedule.cuh): how many heads belong together.
#pragma once

#include <cstdint>

namespace flashjit::cuda {

struct TileSections {
  int heads;   // heads of a section; the last section may have fewer
  int rounds;  // rounds of a persistent grid that a section takes before the next section begins
};

// The sections for `heads` heads of `tiles` tiles each. `blocks` tiles are computed at a
// time, and a head's K and V take `bytes_per_head` of the cache. All counts are positive.
TileSections tile_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head,
                           std::int64_t cache_bytes);

// The same for a persistent grid, whose blocks take turns in a section with as many heads as there are
// blocks. With few tiles of a head, most of the time is that of reading K and V for the first time, so blocks
// should not all do that at once.
TileSections persistent_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head,
                                 std::int64_t cache_bytes);

}  // namespace flashjit::cuda
