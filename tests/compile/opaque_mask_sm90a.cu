// The sm_90a forward under a mask whose rows are no intervals: the per-element test.
#include "cuda/forward_sm90a.cuh"

namespace flashjit::device {

// Every third key. A hull is all it knows, and no block is whole.
struct EveryThird : Interval<EveryThird> {
  static constexpr bool row_intervals = false;
  template <class Params>
  FLASHJIT_FN EveryThird(const Params&, const Problem&) {}
  FLASHJIT_FN Span hull(Keys, Span) const { return {0, 0x7fffffff}; }
  FLASHJIT_FN bool whole(Span, Span) const { return false; }
  FLASHJIT_FN bool keep(int row, int key) const { return (row + key) % 3 == 0; }
};

struct Spec {
  using Element = bf16;
  using Mask = Intersect<Bounds, EveryThird>;
  static constexpr int head_dim = 64, head_dim_v = 64;
  static constexpr bool lse = true, varlen = false;
};

struct Config {
  static constexpr int block_m = 128, block_n = 64, num_stages = 2, num_warps = 12;
  static constexpr bool q_in_registers = true, ping_pong = false;
  static constexpr TileOrder tile_order = TileOrder::heads;
};

__global__ void __launch_bounds__(Config::num_warps * 32, 1)
    opaque_mask(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
  forward_sm90a<Spec, Config>(params, maps);
}

}  // namespace flashjit::device
