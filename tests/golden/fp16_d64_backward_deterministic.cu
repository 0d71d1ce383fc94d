// flashjit backward for sm_80
// {"op": "backward", "dtype": "fp16", "head_dim": 64, "mask": ["padding", "block_sparse"], "dropout": true, "deterministic": true, "grad_dtype": "fp32"}
#include "cuda/backward_dq_sm80.cuh"
#include "shared/block_sparse.h"
#include "cuda/backward_sm80.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : BackwardCudaSpec {
  using Element = fp16;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  using Mask = Intersect<Bounds, Padding, BlockSparse<128, 128, false>>;
  static constexpr bool dropout = true;
  static constexpr bool deterministic = true;
  using grad_dtype = fp32;
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
extern "C" __global__ void __launch_bounds__(Config::num_warps * 32)
    flashjit_backward_dq(const __grid_constant__ CudaBackwardParams params) {
  backward_dq_sm80<Spec, Config>(params);
}
