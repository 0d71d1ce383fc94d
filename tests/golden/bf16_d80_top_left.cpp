// flashjit forward for x86-64-v3
// {"op": "forward", "dtype": "bf16", "head_dim": 80, "mask": [{"kind": "causal", "align": "top_left"}]}
#include "cpu/forward.h"
#include "cpu/vector_products.h"

namespace {

using namespace flashjit::device;

struct Spec : ForwardCpuSpec {
  using Element = bf16;
  static constexpr int head_dim = 80;
  static constexpr int head_dim_v = 80;
  using Mask = Intersect<Bounds, Causal<Align::top_left>>;
};

struct Config {
  static constexpr int block_m = 48;
  static constexpr int block_n = 64;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
  using Products = VectorProducts<Spec, Config>;
};

}  // namespace

extern "C" void flashjit_forward(const CpuForwardParams* params, i64 begin, i64 end, void* scratch) {
  forward<Spec, Config>(*params, begin, end, scratch);
}
