// A few kernels for nvcc and clangd. The library compiles rendered kernels instead (codegen/families/).
#include "cuda/backward_dq_sm80.cuh"
#include "cuda/backward_sm80.cuh"
#include "cuda/decode_merge.cuh"
#include "cuda/forward_sm80.cuh"
#include "cuda/forward_sm80_columns.cuh"
#include "cuda/paged_tile.cuh"
#include "shared/block_sparse.h"
#include "shared/sliding_window.h"
#include "shared/tree.h"

namespace flashjit::device {
namespace {

template <class Element_, int head_dim_, int head_dim_v_, bool varlen_, bool dropout_, class... Masks>
struct Spec : ForwardSm80Spec {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
  static constexpr bool varlen = varlen_, dropout = dropout_;
  using Mask = Intersect<Bounds, Masks...>;
};

template <int block_m_, int block_n_, int num_stages_, int num_warps_>
struct Config {
  static constexpr int block_m = block_m_, block_n = block_n_, num_stages = num_stages_,
                       num_warps = num_warps_;
};

template <class Spec, class Config>
__global__ void __launch_bounds__(Config::num_warps * 32)
    forward(const __grid_constant__ Sm80ForwardParams params) {
  forward_sm80<Spec, Config>(params);
}

template __global__ void forward<Spec<bf16, 128, 128, false, false>, Config<128, 64, 2, 4>>(
    const __grid_constant__ Sm80ForwardParams);
template __global__ void forward<Spec<bf16, 64, 64, false, false, Causal<Align::bottom_right>>,
                                 Config<128, 64, 1, 4>>(const __grid_constant__ Sm80ForwardParams);
template __global__ void forward<Spec<fp16, 72, 40, true, true, Causal<Align::top_left>>,
                                 Config<64, 64, 1, 4>>(const __grid_constant__ Sm80ForwardParams);
template __global__ void forward<Spec<bf16, 256, 256, true, false>, Config<128, 64, 1, 8>>(
    const __grid_constant__ Sm80ForwardParams);
template __global__ void forward<Spec<bf16, 512, 328, false, true, Causal<Align::bottom_right>>,
                                 Config<64, 32, 1, 8>>(const __grid_constant__ Sm80ForwardParams);

template __global__ void
forward<Spec<bf16, 64, 64, false, false, Padding, SlidingWindowWithSinks<Align::bottom_right>,
             BlockSparse<128, 64, true>, Tree>,
        Config<128, 64, 2, 4>>(const __grid_constant__ Sm80ForwardParams);

struct PagedDecodeSpec : DecodeCudaSpec {
  using Element = bf16;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr int head_dim = 128, head_dim_v = 128;
  static constexpr bool varlen = true, paged = true;
};
__global__ void __launch_bounds__(384, 1) paged_decode(const __grid_constant__ CudaDecodeParams params) {
  decode<PagedDecodeSpec, Config<16, 16, 2, 12>>(params);
}
__global__ void __launch_bounds__(128) paged_decode_merge(const __grid_constant__ CudaDecodeParams params) {
  decode_merge<PagedDecodeSpec, Config<16, 16, 2, 12>>(params);
}

template <class Spec>
struct WithPages : Spec {
  static constexpr bool paged = true;
};
template <class Spec, class Config>
__global__ void __launch_bounds__(Config::num_warps * 32)
    paged_forward(const __grid_constant__ Paged<Sm80ForwardParams> params) {
  forward_sm80<WithPages<Spec>, Config>(params);
}
template __global__ void
paged_forward<Spec<bf16, 128, 128, true, false, SlidingWindowWithSinks<Align::bottom_right>>,
              Config<128, 64, 2, 4>>(const __grid_constant__ Paged<Sm80ForwardParams>);

template <class Element_, int head_dim_, class... Masks>
struct BackwardSpec : BackwardCudaSpec {
  using Element = Element_;
  using Mask = Intersect<Bounds, Masks...>;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_;
};
using PlainBackward = BackwardSpec<bf16, 128, Causal<Align::bottom_right>>;
// Without sums of dQ in the workspace.
struct DeterministicBackward : BackwardSpec<fp16, 64, Padding, BlockSparse<128, 64, true>> {
  static constexpr bool varlen = true, dropout = true, deterministic = true;
  using grad_dtype = float;
};

template <class Spec>
__global__ void __launch_bounds__(backward_threads)
    prepare_backward(const __grid_constant__ CudaBackwardParams params) {
  backward_prepare<Spec>(params);
}
template __global__ void prepare_backward<PlainBackward>(const __grid_constant__ CudaBackwardParams);
template __global__ void prepare_backward<DeterministicBackward>(const __grid_constant__ CudaBackwardParams);

template <class Spec, class Config>
__global__ void __launch_bounds__(Config::num_warps * 32)
    backward(const __grid_constant__ CudaBackwardParams params) {
  backward_sm80<Spec, Config>(params);
}
template __global__ void backward<PlainBackward, Config<64, 128, 2, 8>>(
    const __grid_constant__ CudaBackwardParams);
template __global__ void backward<DeterministicBackward, Config<64, 128, 2, 8>>(
    const __grid_constant__ CudaBackwardParams);

__global__ void __launch_bounds__(256) backward_dq(const __grid_constant__ CudaBackwardParams params) {
  backward_dq_sm80<DeterministicBackward, Config<64, 128, 2, 8>>(params);
}
__global__ void __launch_bounds__(backward_threads)
    finish_backward(const __grid_constant__ CudaBackwardParams params) {
  backward_finish<PlainBackward, false>(params);
}

}  // namespace
}  // namespace flashjit::device
