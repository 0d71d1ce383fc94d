// flashjit decode for sm_90
// {"op": "decode", "dtype": "bf16", "head_dim": 64, "mask": ["causal"], "varlen": true, "paged": true, "append": true, "rotary": {"style": "half", "dim": 32, "q": true}}
#include "cuda/decode_merge.cuh"
#include "cuda/append.cuh"
#include "shared/last_keys.h"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : DecodeCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr bool varlen = true;
  static constexpr bool paged = true;
};

struct Config {
  static constexpr int block_m = 16;
  static constexpr int block_n = 32;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 8;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
    flashjit_decode(const __grid_constant__ CudaDecodeParams params) {
  griddepcontrol_wait();
  decode<Spec, Config>(params);
}

extern "C" __global__ void __launch_bounds__(256)
    flashjit_decode_merge(const __grid_constant__ CudaDecodeParams params) {
  decode_merge<Spec, Config>(params);
}

namespace {

struct AppendSpec : AppendCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  static constexpr bool varlen = true;
  static constexpr RotaryStyle rotary = RotaryStyle::half;
  static constexpr int rotary_dim = 32;
  static constexpr bool rotates_q = true;
};

struct AppendConfig {
  static constexpr int num_warps = append_step_warps;
};

using AppendStep = Append<AppendSpec, AppendConfig, LastKeys<CudaAppendParams>>;

}  // namespace

extern "C" __global__ void __launch_bounds__(AppendConfig::num_warps * 32)
    flashjit_append(const __grid_constant__ AppendStep::Params params) {
  griddepcontrol_launch_dependents();
  AppendStep::run(params);
}
