// flashjit forward for x86-64-v3
// {"op": "forward", "dtype": "fp16", "head_dim": 64, "mask": ["sliding_window"], "paged": true}
#include "cpu/forward.h"
#include "cpu/paged_keys.h"
#include "shared/sliding_window.h"
#include "cpu/vector_products.h"

namespace {

using namespace flashjit::device;

struct Spec : ForwardCpuSpec {
  using Element = fp16;
  static constexpr int head_dim = 64;
  static constexpr int head_dim_v = 64;
  using Mask = Intersect<Bounds, SlidingWindow<Align::bottom_right>>;
  static constexpr bool paged = true;
};

struct Config {
  static constexpr int block_m = 192;
  static constexpr int block_n = 128;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
  using Products = VectorProducts<Spec, Config>;
};

}  // namespace

extern "C" void flashjit_forward(const Paged<CpuForwardParams>* params, i64 begin, i64 end, void* scratch) {
  forward<Spec, Config>(*params, begin, end, scratch);
}
