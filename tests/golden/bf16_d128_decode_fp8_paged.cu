// flashjit decode for sm_90
// {"op": "decode", "dtype": "bf16", "head_dim": 128, "paged": true, "kv_dtype": "fp8_e4m3", "kv_scale": "token_head"}
#include "cuda/decode_quantised.cuh"
#pragma nv_hdrstop

namespace {

using namespace flashjit::device;

struct Spec : DecodeCudaSpec {
  using Element = bf16;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  static constexpr bool paged = true;
  using kv_dtype = fp8_e4m3;
  static constexpr KvScale kv_scale = KvScale::token_head;
};

struct Config {
  static constexpr int block_m = 16;
  static constexpr int block_n = 32;
  static constexpr int num_stages = 2;
  static constexpr int num_warps = 12;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(384, 1)
    flashjit_decode(const __grid_constant__ Quantised<CudaDecodeParams> params) {
  decode<Spec, Config>(params);
}

extern "C" __global__ void __launch_bounds__(256)
    flashjit_decode_merge(const __grid_constant__ Quantised<CudaDecodeParams> params) {
  decode_merge<Spec, Config>(params);
}
