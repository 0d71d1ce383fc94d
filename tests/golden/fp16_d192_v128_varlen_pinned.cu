// flashjit forward for sm_120
// {"op": "forward", "dtype": "fp16", "head_dim": 192, "head_dim_v": 128, "mask": [{"kind": "causal", "align": "bottom_right"}, {"kind": "causal", "align": "top_left"}], "dropout": false, "lse": false, "varlen": true, "paged": false, "deterministic": false, "config": {"block_m": 64, "num_warps": 4}}
#include "cuda/forward_sm80.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec {
  using Element = fp16;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>, Causal<Align::top_left>>;
  static constexpr int head_dim = 192;
  static constexpr int head_dim_v = 128;
  static constexpr bool lse = false;
  static constexpr bool varlen = true;
};

struct Config {
  static constexpr int block_m = 64;
  static constexpr int block_n = 32;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 4;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_forward(const __grid_constant__ ForwardParams params) {
  forward_sm80<Spec, Config>(params);
}
