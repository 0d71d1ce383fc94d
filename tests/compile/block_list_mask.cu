// The mask interface as device code: a block list under a causal mask, walked both ways.
#include "unit/block_list_mask.h"

namespace flashjit::device {

__global__ void walk_both_ways(const __grid_constant__ BlockListParams params, Problem problem, int* out) {
  using Mask = Intersect<Bounds, BlockList<64, 128>, Causal<Align::bottom_right>>;
  const Mask mask(params, problem);
  const int first = static_cast<int>(blockIdx.x) * 64;
  const Span across = {first, first + 64};
  const int lane = static_cast<int>(threadIdx.x);
  int kept = 0;

  BlockWalk<Keys, Mask> key_blocks(mask, across, 128);
  for (Block block; key_blocks.next(block);) {
    const Span keys = block_span(block.index, 128);
    const Mask::Tile tile = mask.tile(across, keys);
    kept += block.whole || tile.keep(across.begin + lane, keys.begin);
  }
  BlockWalk<Queries, Mask> row_blocks(mask, across, 64);
  for (Block block; row_blocks.next(block);) {
    const Span rows = block_span(block.index, 64);
    const Mask::Tile tile = mask.tile(rows, across);
    kept += block.whole || tile.keep(rows.begin, across.begin + lane);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = kept;
}

}  // namespace flashjit::device
