// TileOrder::sections (templates/cuda/tile_schedule.cuh): how many heads belong together.
#pragma once

#include <cstdint>

namespace flashjit::cuda {

struct TileSections {
  int heads;   // of a section; the last one may have fewer
  int rounds;  // of the grid that a section takes before the next begins
};

// For `heads` heads of `tiles` tiles each on a grid of `blocks`, where a head's K and V are `bytes_per_head`.
// All counts are positive.
TileSections tile_sections(int heads, int tiles, int blocks, std::int64_t bytes_per_head);

}  // namespace flashjit::cuda
