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
// time, and a head's K and V take `bytes_per_head` of the cache. All these are positive. The rounds have no
// room for early_tiles, the shortest of each head.
TileSections tile_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head,
                           std::int64_t cache_bytes, int early_tiles = 0);

// The first heads of a persistent grid that are in no section: all tiles of a head come together, and a
// block's are long and short by turns. With few tiles of a head, most of the time is that of reading K and V,
// which then come from memory once and in each round as much. All heads, or a multiple of `blocks`.
int turned_heads(int heads, int tiles, int blocks);

}  // namespace flashjit::cuda
