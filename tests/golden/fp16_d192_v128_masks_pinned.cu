// flashjit forward for sm_120
// {"op": "forward", "dtype": "fp16", "head_dim": 192, "head_dim_v": 128, "mask": ["causal", {"kind": "block_sparse", "block_m": 64}, "tree"], "lse": false, "varlen": true}
#include "cuda/forward_sm80.cuh"
#include "shared/block_sparse.h"
#include "shared/tree.h"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : ForwardSm80Spec {
  using Element = fp16;
  static constexpr int head_dim = 192;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>, BlockSparse<64, 128, false>, Tree>;
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
    flashjit_forward(const __grid_constant__ Sm80ForwardParams params) {
  forward_sm80<Spec, Config>(params);
}
