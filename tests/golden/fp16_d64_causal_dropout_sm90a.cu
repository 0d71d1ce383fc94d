// flashjit forward for sm_90a
// {"op": "forward", "dtype": "fp16", "head_dim": 64, "head_dim_v": 64, "mask": [{"kind": "causal", "align": "bottom_right"}], "dropout": true, "lse": true, "varlen": false, "paged": false, "deterministic": false, "config": {}}
#include "cuda/forward_sm90a.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec {
  using Element = fp16;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  static constexpr bool lse = true;
  static constexpr bool varlen = false;
  static constexpr bool dropout = true;
};

struct Config {
  static constexpr int block_m = 192;
  static constexpr int block_n = 96;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 16;
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
