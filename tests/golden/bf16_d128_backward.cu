// flashjit backward for sm_90
// {"op": "backward", "dtype": "bf16", "head_dim": 128, "mask": ["causal"]}
#include "cuda/backward_sm80.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : BackwardCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
};

struct Config {
  static constexpr int block_m = 64;
  static constexpr int block_n = 128;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 8;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(backward_threads, backward_first_blocks)
    flashjit_backward_prepare(const __grid_constant__ CudaBackwardParams params) {
  backward_prepare<Spec, false>(params);
}
extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_backward(const __grid_constant__ CudaBackwardParams params) {
  backward_sm80<Spec, Config>(params);
}
extern "C" __global__ void __launch_bounds__(backward_threads)
    flashjit_backward_finish(const __grid_constant__ CudaBackwardParams params) {
  backward_finish<Spec, false>(params);
}
