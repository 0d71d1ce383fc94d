// flashjit backward for x86-64-v4
// {"op": "backward", "dtype": "fp32", "head_dim": 128, "mask": ["causal"]}
#include "cpu/backward_vectors.h"

namespace {

using namespace flashjit::device;

struct Spec : BackwardCpuSpec {
  using Element = fp32;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
};

struct Config {
  static constexpr int block_n = 256;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
  using Products = VectorBackward<Spec, Config>;
};

}  // namespace

extern "C" void flashjit_backward_rows(const CpuBackwardParams* params, i64 begin, i64 end, void* scratch) {
  backward_rows<Spec, Config>(*params, begin, end, scratch);
}
extern "C" void flashjit_backward(const CpuBackwardParams* params, i64 begin, i64 end, void* scratch) {
  backward<Spec, Config>(*params, begin, end, scratch);
}
extern "C" void flashjit_backward_dq(const CpuBackwardParams* params, i64 begin, i64 end, void*) {
  backward_dq<Spec, Config>(*params, begin, end);
}
