// flashjit forward for sm_90a
// {"op": "forward", "dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "mask": [{"kind": "causal", "align": "bottom_right"}], "dropout": false, "lse": true, "varlen": false, "paged": false, "deterministic": false, "config": {}}
#include "cuda/forward_sm90a.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec {
  using Element = bf16;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  static constexpr bool lse = true;
  static constexpr bool varlen = false;
  static constexpr bool dropout = false;
};

struct Config {
  static constexpr int block_m = 128;
  static constexpr int block_n = 128;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 12;
  static constexpr bool q_in_registers = true;
  static constexpr bool ping_pong = true;
  static constexpr TileOrder tile_order = TileOrder::sections;
  static constexpr bool pack_gqa = false;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::num_warps * 32, 1)
    flashjit_forward(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
  forward_sm90a<Spec, Config>(params, maps);
}
