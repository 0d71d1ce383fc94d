// Forwards of so few rows that CPUs multiply K and V in place, and of some more.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/workload.hpp"
#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class FewRows : public ComputesOnEveryDevice {
 protected:
  // GPUs have no kernels for some dtypes and head dimensions.
  bool takes(const AttentionSpec& spec, std::uint64_t one_in) {
    return why_unsupported(spec, Target::parse(on().target())).empty() && takes_next(spec, one_in);
  }
  void expect(const Case& c, std::uint64_t one_in = 6) {
    if (takes(c.spec, one_in)) {
      EXPECT_TRUE(computes(on(), c));
    }
  }
};

// Every number of rows around those that fill one or two groups of rows, or vectors. Keys fill no step, or
// some.
TEST_P(FewRows, RowsKeysAndHeadDims) {
  std::uint64_t seed = 0;
  for (const DType dtype : on().dtypes())
    for (const auto& [dim, dim_v] : {std::pair{8, 8}, {80, 72}})
      for (int rows = 1; rows <= 18; ++rows)
        expect({.spec = forward_spec(dtype, dim, {}, {.head_dim_v = dim_v}),
                .batch = 1,
                .heads_q = 2,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = std::array{1, 3, 63, 64, 65, 130, 200}[++seed % 7],
                .seed = seed});
}

// Tiles of 16, 32 or 48 rows leave one vector of rows, or less of it, at the end of a longer sequence.
TEST_P(FewRows, AtTheEndOfALongerSequence) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    AttentionSpec spec = forward_spec(dtype, 40, {CausalMask{}});
    if (!on().is_cuda()) spec.config.block_m = 48;
    for (const int rows : {17, 24, 33, 40, 49, 56})
      expect({.spec = spec,
              .batch = 2,
              .heads_q = 2,
              .heads_kv = 1,
              .seqlen_q = rows,
              .seqlen_k = 70,
              .seed = ++seed},
             1);
  }
}

// Keys of a megabyte and more.
TEST_P(FewRows, ManyKeys) {
  std::uint64_t seed = 0;
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const int rows : {1, 13, 16, 17})
      expect({.spec = forward_spec(dtype, 64, {CausalMask{}}),
              .batch = 1,
              .heads_q = 3,
              .heads_kv = 3,
              .seqlen_q = rows,
              .seqlen_k = dtype == DType::fp32 ? 2100 : 4200,
              .seed = ++seed});
}

// Keys that no row sees hold NaN or infinity, which reach no row.
TEST_P(FewRows, Masks) {
  const std::vector<std::vector<Mask>> masks = {
      {CausalMask{}},
      {CausalMask{top_left}, PaddingMask{}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{bottom_right, true}, PaddingMask{}},
      {BlockSparseMask{16, 64}},
      {BlockSparseMask{16, 16, true}},
      {BlockSparseMask{128, 128}, CausalMask{}, PaddingMask{}},
      {TreeMask{}},
      {TreeMask{}, PaddingMask{}},
  };
  std::uint64_t seed = 0;
  for (const auto& mask : masks)
    for (const int rows : {1, 2, 5, 8, 15})
      expect({.spec = forward_spec(++seed / 5 % 2 ? DType::bf16 : DType::fp32, 64, mask,
                                   {.dropout = rows == 5 && mask.size() == 1}),
              .batch = 2,
              .heads_q = 2,
              .heads_kv = 2,
              .seqlen_q = rows,
              .seqlen_k = 150,
              .poison = seed % 2 ? Poison::nan : Poison::infinity,
              .seed = seed});
}

TEST_P(FewRows, GroupsOfHeads) {
  std::uint64_t seed = 0;
  for (const int group : {2, 3, 5, 8, 16})
    for (const int rows : {1, 2, 3})
      expect({.spec = forward_spec(DType::bf16, 80, {CausalMask{}}, {.dropout = seed % 2 == 1}),
              .batch = 2,
              .heads_q = 2 * group,
              .heads_kv = 2,
              .seqlen_q = rows,
              .seqlen_k = 300,
              .seed = ++seed},
             2);
}

// The last of the rows alone sees the last key. On a GPU 0 * NaN is NaN.
TEST_P(FewRows, ALastKeyReachesItsRow) {
  if (on().is_cuda()) GTEST_SKIP() << "a CPU's promise";
  for (const DType dtype : {DType::fp32, DType::bf16})
    for (const int rows : {2, 5, 8}) {
      Workload workload(on(), {.spec = forward_spec(dtype, 64, {CausalMask{}}, {.lse = false}),
                               .seqlen_q = rows,
                               .seqlen_k = 70});
      const Kernel& kernel = workload.kernel(on().engine());
      kernel.launch(workload.args());
      const auto clean = workload.outputs();
      const Tensor v = workload.v().on_host();
      for (std::int64_t c = 0; c < 64; ++c)
        verify::store_element(v.data, v.dtype, 69 * v.strides[1] + c, std::numeric_limits<float>::infinity());
      workload.v().upload();
      workload.reset();
      kernel.launch(workload.args());
      const auto outputs = workload.outputs();
      const auto last = clean.begin() + static_cast<std::ptrdiff_t>(clean.size()) / rows * (rows - 1);
      EXPECT_TRUE(std::equal(clean.begin(), last, outputs.begin())) << rows << " rows";
      EXPECT_FALSE(std::equal(last, clean.end(), outputs.begin() + (last - clean.begin())));
    }
}

// Sequences of few and of many rows in one launch. A CPU's thread uses the same scratch for both in turn:
// here for the first tile of many rows, for the few rows, and for the other tiles, which find their keys
// packed.
TEST_P(FewRows, BesideManyRows) {
  const auto last_second = [](std::int64_t count, void (*body)(void*, std::int64_t, std::int64_t),
                              void* context) {
    body(context, 0, 1);
    if (count > 1) body(context, count - 1, count);
    for (std::int64_t i = 1; i < count - 1; ++i) body(context, i, i + 1);
  };
  if (!GetParam()) return;
  const auto engine =
      on().is_cuda() ? on().make_engine() : on().make_engine({.num_threads = 2, .parallel_for = last_second});
  for (const bool varlen : {true, false}) {
    const Case c{.spec = varlen ? forward_spec(DType::fp32, 64, {}, {.varlen = true})
                                : forward_spec(DType::bf16, 64, {PaddingMask{}}),
                 .batch = 2,
                 .heads_q = 1,
                 .heads_kv = 1,
                 .seqlen_q = 2000,
                 .seqlen_k = 100,
                 .lengths_q = {2000, 3},
                 .lengths_k = {100, 99}};
    if (!takes(c.spec, 1)) continue;
    Workload workload(on(), c);
    workload.kernel(*engine).launch(workload.args());
    EXPECT_TRUE(workload.check());
  }
}

TEST_P(FewRows, Pages) {
  std::uint64_t seed = 0;
  for (const int page_size : {1, 16, 96})
    for (const int rows : {1, 4, 7})
      for (const DType dtype : {DType::fp32, DType::bf16})
        expect({.spec = forward_spec(dtype, 64, {CausalMask{}}, {.varlen = true, .paged = true}),
                .heads_q = 4,
                .heads_kv = 2,
                .lengths_q = {rows, 1, 0, 30},
                .lengths_k = {300, 65, 9, 150},
                .page_size = page_size,
                .poison = seed % 3 ? Poison::nan : Poison::infinity,
                .seed = ++seed});
}

TEST_P(FewRows, EightBitKeys) {
  std::uint64_t seed = 0;
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
      for (const int rows : {1, 6})
        expect({.spec =
                    forward_spec(DType::bf16, 80, {CausalMask{}},
                                 {.varlen = true, .paged = true, .kv_dtype = kv_dtype, .kv_scale = kv_scale}),
                .heads_q = 2,
                .heads_kv = 2,
                .lengths_q = {rows, 1, 30},
                .lengths_k = {200, 65, 90},
                .page_size = 16,
                .poison = seed % 2 ? Poison::nan : Poison::infinity,
                .seed = ++seed});
}

FLASHJIT_ON_EVERY_DEVICE(FewRows);

}  // namespace
}  // namespace flashjit::testing_support
