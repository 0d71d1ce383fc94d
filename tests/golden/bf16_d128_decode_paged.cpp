// flashjit decode for x86-64-v4
// {"op": "decode", "dtype": "bf16", "head_dim": 128, "mask": [{"kind": "sliding_window", "sinks": true}], "varlen": true, "paged": true}
#include "cpu/decode.h"
#include "shared/sliding_window.h"

namespace {

using namespace flashjit::device;

struct Spec : DecodeCpuSpec {
  using Element = bf16;
  static constexpr int head_dim = 128;
  static constexpr int head_dim_v = 128;
  using Mask = Intersect<Bounds, SlidingWindowWithSinks<Align::bottom_right>>;
  static constexpr bool varlen = true;
  static constexpr bool paged = true;
};

struct Config {
  static constexpr int block_m = 64;
  static constexpr int block_n = 64;
  static constexpr int num_stages = 1;
  static constexpr int num_warps = 1;
};

}  // namespace

extern "C" void flashjit_decode(const CpuDecodeParams* params, i64 begin, i64 end, void* scratch) {
  decode<Spec, Config>(*params, begin, end, scratch);
}
