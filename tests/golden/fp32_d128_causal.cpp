// flashjit forward for x86-64-v4
// {"op": "forward", "dtype": "fp32", "head_dim": 128, "mask": ["causal"]}
#include "cpu/forward.h"
#include "cpu/vector_products.h"

namespace {

using namespace flashjit::device;

struct Spec : ForwardCpuSpec {
  using Element = fp32;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
};

struct Config {
  static constexpr int block_m = 192;
  static constexpr int block_n = 128;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
  using Products = VectorProducts<Spec, Config>;
};

}  // namespace

extern "C" void flashjit_forward(const CpuForwardParams* params, i64 begin, i64 end, void* scratch) {
  forward<Spec, Config>(*params, begin, end, scratch);
}
