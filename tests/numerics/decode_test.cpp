// Decode against the float64 oracle: new tokens, heads of a group, head dims, caches contiguous and paged,
// lengths, masks, packed rows, threads. Memory around tensors is guarded, stale slots hold poison, page ids
// that nobody may use hold anything.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include "tests/numerics/specs.hpp"
#include "tests/support/positions.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class Decode : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
};

TEST_P(Decode, NewTokensAndGroups) {
  std::uint64_t seed = 0;
  for (const bool paged : {false, true}) {
    for (const DType dtype : on().dtypes()) {
      const AttentionSpec spec = decode_spec(dtype, 64, {CausalMask{}}, {.paged = paged});
      if (!takes_next(spec)) continue;
      for (const int rows : {1, 2, 5, 16, 63, 64})
        for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, {4, 1}, {16, 2}, {15, 3}, {11, 1}, {64, 1}})
          expect({.spec = spec,
                  .batch = 2,
                  .heads_q = heads_q,
                  .heads_kv = heads_kv,
                  .seqlen_q = rows,
                  .seqlen_k = 150 + rows,
                  .page_size = paged ? 16 : 0,
                  .seed = ++seed});
    }
  }
}

TEST_P(Decode, MoreQueryHeadsThanATileHasRows) {
  expect({.spec = decode_spec(DType::bf16, 64),
          .heads_q = 200,
          .heads_kv = 1,
          .seqlen_q = 3,
          .seqlen_k = 700,
          .seed = 3});
}

TEST_P(Decode, HeadDims) {
  std::uint64_t seed = 100;
  for (const DType dtype : on().dtypes())
    for (const auto& [dim, dim_v] : {std::pair{64, 64},
                                     {64, 128},
                                     {72, 72},
                                     {80, 200},
                                     {96, 96},
                                     {120, 8},
                                     {128, 128},
                                     {192, 128},
                                     {200, 64},
                                     {256, 256},
                                     {8, 16}}) {
      const bool paged = seed % 2;
      const AttentionSpec spec =
          decode_spec(dtype, dim, {}, {.head_dim_v = dim_v, .lse = dim != 96, .paged = paged});
      seed += 3;
      if (!takes_next(spec)) continue;
      expect({.spec = spec,
              .batch = 2,
              .heads_q = 8,
              .heads_kv = 2,
              .seqlen_q = 2,
              .seqlen_k = 333,
              .page_size = paged ? 64 : 0,
              .seed = seed});
    }
}

TEST_P(Decode, PageSizesAndLayouts) {
  std::uint64_t seed = 200;
  for (const DType dtype : on().dtypes()) {
    const AttentionSpec spec = decode_spec(dtype, 64, {CausalMask{}}, {.paged = true});
    if (!takes_next(spec)) continue;
    for (const int page_size : {1, 2, 16, 48, 64, 256, 512})
      for (const MemoryLayout layout : {MemoryLayout::contiguous, MemoryLayout::heads_first,
                                        on().is_cuda() ? MemoryLayout::padded : MemoryLayout::odd})
        expect({.spec = spec,
                .batch = 3,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_q = 3,
                .seqlen_k = 400,
                .page_size = page_size,
                .layout = layout,
                .layout_kv = layout,
                .poison = seed % 2 ? Poison::nan : Poison::infinity,
                .seed = ++seed});
  }
}

TEST_P(Decode, LengthsThatDiffer) {
  std::uint64_t seed = 300;
  for (const bool paged : {false, true})
    for (const DType dtype : on().dtypes()) {
      const AttentionSpec spec = decode_spec(dtype, 128, {CausalMask{}}, {.paged = paged});
      if (!takes_next(spec)) continue;
      for (const int rows : {1, 4})
        expect({.spec = spec,
                .batch = 7,
                .heads_q = 8,
                .heads_kv = 2,
                .seqlen_q = rows,
                .seqlen_k = 2048,
                .lengths_k = {0, 2048, 1, 3, 512, 65, 1700},
                .page_size = paged ? 16 : 0,
                .seed = ++seed});
    }
}

TEST_P(Decode, Masks) {
  const std::vector<std::vector<Mask>> lists = {
      {CausalMask{}},
      {CausalMask{top_left}},
      {SlidingWindowMask{}},
      {SlidingWindowMask{bottom_right, true}},
      {SlidingWindowMask{top_left, true}},
      {TreeMask{}},
      {CausalMask{}, SlidingWindowMask{}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}},
      {TreeMask{}, SlidingWindowMask{}},
      {CausalMask{}, SlidingWindowMask{bottom_right, true}, TreeMask{}},
  };
  std::uint64_t seed = 400;
  for (const auto& masks : lists)
    for (const bool paged : {false, true}) {
      const std::vector<DType> dtypes = on().dtypes();
      const AttentionSpec spec = decode_spec(dtypes[seed++ % dtypes.size()], 64, masks, {.paged = paged});
      if (!takes_next(spec)) continue;
      std::uint64_t of_sizes = 10 * seed;
      for (const auto& [rows, keys] : {std::pair{1, 300}, {5, 700}, {64, 130}, {33, 1100}})
        for (int repeat = 0; repeat < 3; ++repeat)
          expect({.spec = spec,
                  .batch = 3,
                  .heads_q = 4,
                  .heads_kv = 2,
                  .seqlen_q = rows,
                  .seqlen_k = keys,
                  .page_size = paged ? 16 << 2 * repeat : 0,
                  .poison = repeat % 2 ? Poison::infinity : Poison::nan,
                  .seed = ++of_sizes});
    }
}

TEST_P(Decode, PackedRows) {
  std::uint64_t seed = 500;
  for (const auto& masks : std::vector<std::vector<Mask>>{
           {}, {CausalMask{}}, {SlidingWindowMask{bottom_right, true}}, {TreeMask{}}})
    for (const bool paged : {false, true}) {
      const AttentionSpec spec = decode_spec(DType::bf16, 64, masks, {.varlen = true, .paged = paged});
      seed += 4;
      if (!takes_next(spec)) continue;
      std::uint64_t of_lengths = seed;
      for (const std::optional<int> max : {std::optional<int>{}, std::optional<int>{64}})
        expect({.spec = spec,
                .heads_q = 4,
                .heads_kv = 2,
                .seqlen_k = 600,
                .lengths_q = {0, 5, 64, 1, 1, 17, 0},
                .lengths_k = {7, 5, 600, 130, 0, 64, 0},
                .page_size = paged ? 16 : 0,
                .spare_rows = max ? 130 : 0,
                .max_seqlen_q = max,
                .seed = ++of_lengths});
    }
}

TEST_P(Decode, NothingToDo) {
  for (const bool paged : {false, true}) {
    const AttentionSpec spec = decode_spec(DType::bf16, 64, {}, {.paged = paged});
    const int page_size = paged ? 16 : 0;
    expect({.spec = spec, .batch = 0, .seqlen_q = 1, .seqlen_k = 40, .page_size = page_size});
    expect({.spec = spec, .batch = 2, .seqlen_q = 0, .seqlen_k = 40, .page_size = page_size});
    expect({.spec = spec, .batch = 2, .seqlen_q = 1, .seqlen_k = 0, .page_size = page_size});
    expect({.spec = spec,
            .batch = 2,
            .seqlen_q = 3,
            .seqlen_k = 40,
            .lengths_k = {0, 0},
            .page_size = page_size});
  }
}

TEST_P(Decode, ScoresFarFromZeroAndWeightsOfOneKey) {
  std::uint64_t seed = 600;
  for (const DType dtype : on().dtypes())
    for (const Data data : {Data::huge_scores, Data::rising, Data::falling, Data::equal_scores}) {
      const AttentionSpec spec = decode_spec(dtype, 64);
      if (!takes_next(spec)) continue;
      expect({.spec = spec,
              .heads_q = 4,
              .heads_kv = 1,
              .seqlen_q = 2,
              .seqlen_k = 2000,
              .data = data,
              .seed = ++seed});
    }
}

TEST_P(Decode, OutputsInFloat32) {
  for (const bool varlen : {false, true}) {
    const AttentionSpec spec = decode_spec(DType::bf16, 64, {}, {.varlen = varlen, .o_dtype = DType::fp32});
    if (!takes_next(spec)) continue;
    expect({.spec = spec,
            .heads_q = 4,
            .heads_kv = 1,
            .seqlen_q = 2,
            .seqlen_k = 200,
            .lengths_q = varlen ? std::vector{2, 1} : std::vector<int>{},
            .seed = 9});
  }
}

// However many threads there are and whoever ends last, the result is right; for one number of threads its
// bits are the same.
TEST_P(Decode, ManyThreadsAndFew) {
  if (on().is_cuda()) GTEST_SKIP() << "a GPU divides no work among host threads";
  using Body = void (*)(void*, std::int64_t, std::int64_t);
  std::int64_t pieces = 0;
  const auto first_to_last = [&](std::int64_t count, Body body, void* context) {
    pieces = count;
    for (std::int64_t i = 0; i < count; ++i) body(context, i, i + 1);
  };
  const auto last_to_first = [](std::int64_t count, Body body, void* context) {
    for (std::int64_t i = count; i-- > 0;) body(context, i, i + 1);
  };
  std::uint64_t seed = 700;
  for (const bool paged : {false, true}) {
    const AttentionSpec spec = decode_spec(DType::bf16, 64, {CausalMask{}}, {.paged = paged});
    if (!takes_next(spec)) continue;
    for (const int threads : {1, 3, 24}) {
      const std::unique_ptr<Engine> engines[] = {
          on().make_engine({.num_threads = threads, .parallel_for = first_to_last}),
          on().make_engine({.num_threads = threads, .parallel_for = last_to_first}),
          on().make_engine({.num_threads = threads})};
      for (const auto& [rows, heads_q, heads_kv] : {std::tuple{1, 8, 2}, {33, 6, 2}, {64, 4, 4}}) {
        Workload workload(on(), {.spec = spec,
                                 .batch = 3,
                                 .heads_q = heads_q,
                                 .heads_kv = heads_kv,
                                 .seqlen_q = rows,
                                 .seqlen_k = 4500,
                                 .lengths_k = {4500, 0, 300},
                                 .page_size = paged ? 48 : 0,
                                 .seed = ++seed});
        std::vector<std::byte> bits;
        for (const auto& engine : engines) {
          workload.reset();
          workload.kernel(*engine).launch(workload.args());
          EXPECT_TRUE(workload.check()) << threads << " threads";
          if (bits.empty()) bits = workload.outputs();
          EXPECT_EQ(workload.outputs(), bits) << threads << " threads";
        }
        EXPECT_TRUE(threads <= 3 || pieces > 3 * heads_kv) << "keys were not worked on in parts";
      }
    }
  }
}

// A prepared launch reads lengths and page ids when it runs, and so does a captured graph on a GPU.
TEST_P(Decode, ReplaysFollowLengthsAndPages) {
  for (const bool paged : {false, true}) {
    SCOPED_TRACE(paged ? "paged" : "contiguous");
    // No slot is stale at first, so that any page may be anywhere.
    const std::unique_ptr<Engine> engine = on().make_engine({.num_threads = 4});
    Workload workload(on(), {.spec = decode_spec(DType::bf16, 64, {CausalMask{}}, {.paged = paged}),
                             .batch = 3,
                             .heads_q = 4,
                             .heads_kv = 2,
                             .seqlen_q = 2,
                             .seqlen_k = 1600,
                             .lengths_k = {1600, 1600, 1600},
                             .page_size = paged ? 16 : 0,
                             .seed = 5});
    const Kernel& kernel = workload.kernel(*engine);
    const PreparedLaunch prepared = kernel.prepare(workload.args());
    std::unique_ptr<cuda::Graph> graph;
    if (on().is_cuda())
      graph = std::make_unique<cuda::Graph>(on().context(),
                                            [&](Stream stream) { kernel.launch(workload.args(), stream); });
    const AttentionArgs& host = workload.host_args();
    auto* lengths = static_cast<std::int32_t*>(host.seqlens_k->data);
    std::mt19937 random(1);
    for (const std::array<int, 3>& now : {std::array{1600, 1600, 1600}, {0, 1, 1599}, {700, 0, 0}}) {
      std::copy(now.begin(), now.end(), lengths);
      workload.tensor(&AttentionArgs::seqlens_k).upload();
      if (paged) {
        const Tensor& table = *host.page_table;
        std::vector<std::int32_t> ids(static_cast<std::size_t>(table.shape[0] * table.shape[1]));
        std::iota(ids.begin(), ids.end(), 0);
        std::shuffle(ids.begin(), ids.end(), random);
        for (std::int64_t b = 0; b < table.shape[0]; ++b)
          for (std::int64_t page = 0; page < table.shape[1]; ++page)
            static_cast<std::int32_t*>(table.data)[b * table.strides[0] + page] =
                page * 16 < now[static_cast<std::size_t>(b)]
                    ? ids[static_cast<std::size_t>(b * table.shape[1] + page)]
                    : static_cast<std::int32_t>(random());
        workload.tensor(&AttentionArgs::page_table).upload();
      }
      for (const bool from_graph : {false, true}) {
        if (from_graph && !graph) continue;
        workload.reset();
        from_graph ? graph->launch() : prepared.launch();
        EXPECT_TRUE(workload.check()) << (from_graph ? "a graph's replay" : "a prepared launch");
      }
    }
  }
}

// A row alone, and among other rows and sequences, in pages of other sizes: the same bits with
// batch_invariant.
TEST_P(Decode, RowsDoNotDependOnTheRestOfTheBatch) {
  if (!on().is_cuda()) GTEST_SKIP() << "batch_invariant has no kernel for CPUs";
  constexpr int position = 3100;  // of the row
  for (const DType dtype : on().dtypes()) {
    const AttentionSpec spec =
        decode_spec(dtype, 64, {SlidingWindowMask{}},
                    {.varlen = true, .o_dtype = DType::fp32, .paged = true, .batch_invariant = true});
    if (!takes_next(spec)) continue;
    std::vector<std::byte> expected;
    for (const auto& [lengths_q, later_keys, page_size, others] :
         std::vector<std::tuple<std::vector<int>, int, int, std::vector<int>>>{
             {{1}, 0, 16, {}},
             {{1}, 0, 256, {}},
             {{1, 2, 1, 0}, 0, 48, {5, 900, 0}},
             {{3}, 0, 1, {}},
             {{3, 1}, 2, 16, {4000}},
             {{20}, 0, 16, {}},
             {{64, 64}, 63, 64, {100}},
             {{40, 1, 1, 1, 1, 1}, 7, 16, {70, 3000, 1, 513, 512}}}) {
      std::vector<int> lengths_k = {position + 1 + later_keys};
      lengths_k.insert(lengths_k.end(), others.begin(), others.end());
      for (const int threads : {1, 5}) {
        Workload workload(on(), {.spec = spec,
                                 .heads_q = 6,
                                 .heads_kv = 2,
                                 .seqlen_k = 4096,
                                 .lengths_q = lengths_q,
                                 .lengths_k = lengths_k,
                                 .page_size = page_size,
                                 .max_seqlen_q = std::ranges::max(lengths_q)});
        std::vector<std::uint64_t> names = {1000};
        for (std::size_t b = 1; b < lengths_q.size(); ++b) names.push_back(b);
        fill_by_position(workload, names);
        const std::unique_ptr<Engine> engine = on().make_engine({.num_threads = threads});
        const Kernel& kernel = workload.kernel(*engine);
        AttentionArgs args = workload.args();
        args.window_left = 2070;  // the rows before it see a part more
        args.window_right = 0;
        workload.reset();
        kernel.launch(args);
        ASSERT_TRUE(workload.fetch());
        const std::vector<std::byte> bits = bits_of_row(workload, 0, lengths_q[0] - 1 - later_keys);
        if (expected.empty()) expected = bits;
        EXPECT_EQ(bits, expected) << workload.given().str() << ", " << threads << " threads";
      }
    }
  }
}

FLASHJIT_ON_EVERY_DEVICE(Decode);

}  // namespace
}  // namespace flashjit::testing_support
