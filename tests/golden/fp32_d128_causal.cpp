// flashjit forward for x86-64-v4
// {"op": "forward", "dtype": "fp32", "head_dim": 128, "head_dim_v": 128, "mask": [{"kind": "causal", "align": "bottom_right"}], "dropout": false, "lse": true, "varlen": false, "paged": false, "deterministic": false, "config": {}}
#include "cpu/forward.h"
#include "cpu/vector_products.h"

namespace {

using namespace flashjit::device;

struct Spec {
  using Element = fp32;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  static constexpr bool lse = true;
  static constexpr bool varlen = false;
  static constexpr bool dropout = false;
};

struct Config {
  static constexpr int block_m = 192;
  static constexpr int block_n = 128;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
  using Products = VectorProducts<Spec, Config>;
};

}  // namespace

extern "C" void flashjit_forward(const ForwardParams* params, i64 begin, i64 end, void* scratch) {
  forward<Spec, Config>(*params, begin, end, scratch);
}
