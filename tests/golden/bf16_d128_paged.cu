// flashjit forward for sm_90
// {"op": "forward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"], "varlen": true, "paged": true}
#include "cuda/forward_sm80.cuh"
#include "cuda/paged_tile.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : ForwardSm80Spec {
  using Element = bf16;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr bool varlen = true;
  static constexpr bool paged = true;
};

struct Config {
  static constexpr int block_m = 128;
  static constexpr int block_n = 64;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 4;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_forward(const __grid_constant__ Paged<Sm80ForwardParams> params) {
  forward_sm80<Spec, Config>(params);
}
