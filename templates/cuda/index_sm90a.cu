// A few sm_90a kernels for nvcc (-arch=sm_90a) and clangd. The library compiles rendered kernels instead
// (codegen/families/).
#include "cuda/backward_sm90a.cuh"
#include "cuda/backward_sm90a_dq.cuh"
#include "cuda/backward_sm90a_wide.cuh"
#include "cuda/backward_sm90a_wide_dq.cuh"
#include "cuda/forward_sm90a.cuh"
#include "cuda/forward_sm90a_pages.cuh"
#include "shared/tree.h"

namespace flashjit::device {
namespace {

template <class Element_, int head_dim_, int head_dim_v_, bool varlen_, bool dropout_, class... Masks>
struct Spec : ForwardSm90aSpec {
  using Element = Element_;
  static constexpr int head_dim = head_dim_, head_dim_v = head_dim_v_;
  static constexpr bool varlen = varlen_, dropout = dropout_;
  using Mask = Intersect<Bounds, Masks...>;
};

// A stand-in: products are rendered for each kernel (codegen/families/wgmma_products.hpp).
struct NoProducts {
  template <class... Operands>
  static FLASHJIT_FN void qk(const Operands&...) {}
  template <class... Operands>
  static FLASHJIT_FN void pv(const Operands&...) {}
};

template <int block_m_, int block_n_, bool q_in_registers_, TileOrder tile_order_, bool pack_gqa_ = false>
struct Config {
  static constexpr int block_m = block_m_, block_n = block_n_, num_stages = 2, num_warps = block_m / 16 + 4;
  static constexpr bool q_in_registers = q_in_registers_, ping_pong = block_m > 64;
  static constexpr TileOrder tile_order = tile_order_;
  static constexpr bool pack_gqa = pack_gqa_;
  using Products = NoProducts;
};

template <class Spec, class Config>
__global__ void __launch_bounds__(Config::num_warps * 32, 1)
    forward(const __grid_constant__ Sm90aForwardParams params, const __grid_constant__ ForwardMaps maps) {
  forward_sm90a<Spec, Config>(params, maps);
}

template __global__ void forward<Spec<bf16, 128, 128, false, false, Causal<Align::bottom_right>>,
                                 Config<128, 128, true, TileOrder::sections>>(
    const __grid_constant__ Sm90aForwardParams, const __grid_constant__ ForwardMaps);
template __global__ void forward<Spec<fp16, 72, 40, true, true>, Config<192, 96, true, TileOrder::heads>>(
    const __grid_constant__ Sm90aForwardParams, const __grid_constant__ ForwardMaps);
template __global__ void
forward<Spec<bf16, 128, 128, true, true, Tree>, Config<128, 128, true, TileOrder::heads, true>>(
    const __grid_constant__ Sm90aForwardParams, const __grid_constant__ ForwardMaps);
template __global__ void
forward<Spec<bf16, 256, 256, false, false>, Config<128, 80, false, TileOrder::heads>>(
    const __grid_constant__ Sm90aForwardParams, const __grid_constant__ ForwardMaps);

template <class Spec>
struct WithPages : Spec {
  static constexpr bool paged = true;
};
template <class Spec, class Config>
__global__ void __launch_bounds__(Config::num_warps * 32, 1)
    paged_forward(const __grid_constant__ Paged<Sm90aForwardParams> params,
                  const __grid_constant__ ForwardMaps maps) {
  forward_sm90a<WithPages<Spec>, Config>(params, maps);
}
template __global__ void paged_forward<Spec<bf16, 128, 128, true, false, Causal<Align::bottom_right>>,
                                       Config<128, 128, true, TileOrder::waves>>(
    const __grid_constant__ Paged<Sm90aForwardParams>, const __grid_constant__ ForwardMaps);

struct BackwardSpec : BackwardCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 128, head_dim_v = 128;
};
struct DeterministicSpec : BackwardSpec {
  static constexpr bool deterministic = true;
};
struct NoBackwardProducts {
  template <class... Operands>
  static FLASHJIT_FN void s(const Operands&...) {}
  template <class... Operands>
  static FLASHJIT_FN void dp(const Operands&...) {}
  template <class... Operands>
  static FLASHJIT_FN void dv(const Operands&...) {}
  template <class... Operands>
  static FLASHJIT_FN void dk(const Operands&...) {}
  template <class... Operands>
  static FLASHJIT_FN void dq(const Operands&...) {}
};
struct BackwardConfig {
  static constexpr int block_m = 64, block_n = 128, num_stages = 2, num_warps = 12;
  using Products = NoBackwardProducts;
  using DqProducts = NoBackwardProducts;
};
__global__ void __launch_bounds__(384, 1)
    backward(const __grid_constant__ CudaBackwardParams params, const __grid_constant__ BackwardMaps maps) {
  backward_sm90a<BackwardSpec, BackwardConfig>(params, maps);
}
__global__ void __launch_bounds__(Sm90aDqLayout::threads, 1)
    backward_dq(const __grid_constant__ CudaBackwardParams params,
                const __grid_constant__ BackwardMaps maps) {
  backward_dq_sm90a<DeterministicSpec, BackwardConfig>(params, maps);
}

struct WideBackwardSpec : BackwardCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 512, head_dim_v = 512;
};
struct WideBackwardConfig {
  using Products = NoBackwardProducts;
};
__global__ void __launch_bounds__(Sm90aWideLayout::threads, 1)
    wide_backward(const __grid_constant__ CudaBackwardParams params,
                  const __grid_constant__ BackwardMaps maps) {
  backward_sm90a_wide<WideBackwardSpec, WideBackwardConfig>(params, maps);
}
__global__ void __launch_bounds__(Sm90aWideLayout::threads, 1)
    wide_backward_dq(const __grid_constant__ CudaBackwardParams params,
                     const __grid_constant__ BackwardMaps maps) {
  backward_dq_sm90a_wide<WideBackwardSpec, WideBackwardConfig>(params, maps);
}

}  // namespace
}  // namespace flashjit::device
