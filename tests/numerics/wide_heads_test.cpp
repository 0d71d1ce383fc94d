// Heads of more than 256 columns, where a family takes them: tiles shrink, and rows of zeros grow. Each kind
// of kernel with what else reads or writes whole rows.
#include <gtest/gtest.h>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;
constexpr std::pair<int, int> dims[] = {{264, 264}, {320, 320}, {512, 512},
                                        {576, 512}, {64, 1024}, {1024, 1024}};

class WideHeads : public ComputesOnEveryDevice {
 protected:
  // Each place has others of the device's dtypes. Kernels of wide heads take long to compile.
  void expect(Case c, int place) {
    const std::vector<DType> dtypes = on().dtypes();
    if (!c.spec.kv_dtype) c.spec.dtype = dtypes[static_cast<std::size_t>(place) % dtypes.size()];
    if (!why_unsupported(c.spec, Target::parse(on().target())).empty() || !takes_next(c.spec, 18)) return;
    c.batch = 2;
    c.seqlen_q = c.seqlen_q > 1 ? c.seqlen_q : 70;
    c.seqlen_k = 150;
    c.layout = c.layout_kv = static_cast<MemoryLayout>(place % 4);
    // GPU kernels take rows of caches that begin at multiples of 16 bytes.
    if (on().is_cuda() && c.spec.kv_dtype && (c.spec.head_dim % 16 || c.spec.head_dim_v % 16))
      c.layout_kv = MemoryLayout::padded;
    c.seed = static_cast<std::uint64_t>(place + 1);
    EXPECT_TRUE(computes(on(), c));
  }
};

TEST_P(WideHeads, Forward) {
  int place = 0;
  for (const auto& [dim, dim_v] : dims) {
    const auto spec = [&, dim = dim, dim_v = dim_v](std::vector<Mask> mask, SpecOptions options = {}) {
      options.head_dim_v = dim_v;
      return forward_spec(DType::bf16, dim, std::move(mask), options);
    };
    expect({.spec = spec({CausalMask{}, PaddingMask{}}, {.dropout = true}), .heads_q = 4, .heads_kv = 2},
           ++place);
    // A list whose blocks are larger than any tile of the widest heads. Keys of other pages are zeros.
    expect({.spec = spec({BlockSparseMask{256, 240}, TreeMask{}})}, ++place);
    expect({.spec = spec({SlidingWindowMask{}}, {.o_dtype = DType::fp32, .paged = true}), .page_size = 16},
           ++place);
    if (dim_v <= dim)
      expect({.spec = spec({CausalMask{}}, {.varlen = true, .v_in_k = true}),
              .heads_q = 4,
              .lengths_q = {70, 0, 3},
              .lengths_k = {70, 5, 90}},
             ++place);
    expect({.spec = spec({CausalMask{}},
                         {.paged = true, .kv_dtype = DType::int8, .kv_scale = KvScale::token_head}),
            .page_size = 16},
           ++place);
  }
}

TEST_P(WideHeads, Decode) {
  int place = 0;
  for (const auto& [dim, dim_v] : dims) {
    const auto spec = [&, dim = dim, dim_v = dim_v](std::vector<Mask> mask, SpecOptions options = {}) {
      options.head_dim_v = dim_v;
      return decode_spec(DType::bf16, dim, std::move(mask), options);
    };
    expect({.spec = spec({CausalMask{}}, {.paged = true}), .heads_q = 128, .seqlen_q = 2, .page_size = 16},
           ++place);
    if (dim_v <= dim)
      expect({.spec = spec({CausalMask{}}, {.paged = true, .v_in_k = true}),
              .heads_q = 16,
              .seqlen_q = 2,
              .page_size = 64},
             ++place);
    if (dim_v <= dim)
      expect({.spec = spec({CausalMask{}}, {.paged = true, .v_in_k = true, .kv_dtype = DType::fp8_e4m3}),
              .heads_q = 16,
              .seqlen_q = 2,
              .page_size = 64},
             ++place);
    expect({.spec = spec({SlidingWindowMask{}}, {.batch_invariant = true}),
            .heads_q = 6,
            .heads_kv = 2,
            .seqlen_q = 5},
           ++place);
    expect({.spec = spec({TreeMask{}}, {.kv_dtype = DType::fp8_e4m3, .kv_scale = KvScale::token_head}),
            .heads_q = 3,
            .seqlen_q = 3},
           ++place);
  }
}

// Keys of 656 bytes, whose 512 columns have four scales (templates/shared/ds_mla.h).
TEST_P(WideHeads, DecodeOfDsMla) {
  const auto spec = [](std::vector<Mask> mask, SpecOptions options = {}) {
    options.head_dim_v = 512;
    options.v_in_k = true;
    options.kv_dtype = DType::fp8_ds_mla;
    return decode_spec(DType::bf16, 576, std::move(mask), options);
  };
  const std::vector<Case> cases = {
      {.spec = spec({CausalMask{}}, {.paged = true}), .heads_q = 16, .seqlen_q = 2, .page_size = 64},
      {.spec = spec({SlidingWindowMask{}}, {.o_dtype = DType::fp32, .paged = true}),
       .heads_q = 128,
       .seqlen_q = 3,
       .page_size = 16},
      {.spec = spec({CausalMask{}}, {.varlen = true, .paged = true, .batch_invariant = true}),
       .heads_q = 20,
       .lengths_q = {2, 0, 5},
       .lengths_k = {150, 7, 60},
       .page_size = 64},
      {.spec = spec({TreeMask{}}), .heads_q = 6, .heads_kv = 2, .seqlen_q = 5}};
  std::uint64_t seed = 0;
  for (Case c : cases) {
    if (!why_unsupported(c.spec, Target::parse(on().target())).empty()) return;
    c.batch = 2;
    c.seqlen_k = 150;
    for (const Poison poison : {Poison::nan, Poison::infinity}) {
      c.poison = poison;
      c.seed = ++seed;
      c.layout_kv = seed % 2 ? MemoryLayout::contiguous : MemoryLayout::heads_first;
      if (!takes_next(c.spec, 3)) continue;
      EXPECT_TRUE(computes(on(), c));
    }
  }
}

TEST_P(WideHeads, Backward) {
  int place = 0;
  for (const auto& [dim, dim_v] : dims) {
    const auto spec = [&, dim = dim, dim_v = dim_v](std::vector<Mask> mask, SpecOptions options = {}) {
      options.head_dim_v = dim_v;
      return attention_spec(Operation::backward, DType::bf16, dim, std::move(mask), options);
    };
    expect({.spec = spec({CausalMask{}}, {.dropout = true}), .heads_q = 4, .heads_kv = 2}, ++place);
    expect({.spec = spec({BlockSparseMask{64, 256}}, {})}, ++place);
  }
}

// Multi-head latent attention in the form of one shared head: V is a view of the first columns of K.
TEST_P(WideHeads, DecodeWhoseValuesAreAPartOfItsKeys) {
  const AttentionSpec spec = decode_spec(DType::bf16, 576, {CausalMask{}}, {.head_dim_v = 512});
  if (!why_unsupported(spec, Target::parse(on().target())).empty()) return;
  Workload workload(on(), {.spec = spec, .batch = 2, .heads_q = 16, .seqlen_q = 2, .seqlen_k = 150});
  const Tensor k = workload.k().on_host(), v = workload.v().on_host();
  std::int64_t at[4] = {};
  const auto offset = [&](const Tensor& t) {
    return at[0] * t.strides[0] + at[1] * t.strides[1] + at[2] * t.strides[2] + at[3] * t.strides[3];
  };
  for (at[0] = 0; at[0] < v.shape[0]; ++at[0])
    for (at[1] = 0; at[1] < v.shape[1]; ++at[1])
      for (at[2] = 0; at[2] < v.shape[2]; ++at[2])
        for (at[3] = 0; at[3] < v.shape[3]; ++at[3])
          verify::store_element(v.data, v.dtype, offset(v),
                                static_cast<float>(verify::load_element(k.data, k.dtype, offset(k))));
  workload.v().upload();
  const Kernel& kernel = workload.kernel(on().engine());
  AttentionArgs args = workload.args();
  args.v = args.k;
  args.v->shape[3] = 512;
  kernel.launch(args);
  EXPECT_TRUE(workload.check());
}

FLASHJIT_ON_EVERY_DEVICE(WideHeads);

}  // namespace
}  // namespace flashjit::testing_support
