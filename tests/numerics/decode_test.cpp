// Decode against the float64 oracle: new tokens, heads of a group, head dims, caches contiguous and paged,
// lengths, masks, packed rows, threads. Memory around tensors is guarded, stale slots hold poison, page ids
// that nobody may use hold anything.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <random>

#include "codegen/families/kernel_family.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/far_scales.hpp"
#include "tests/support/positions.hpp"
#include "tests/support/workload.hpp"

namespace flashjit::testing_support {
namespace {

using enum CausalAlign;

class Decode : public ComputesOnEveryDevice {
 protected:
  void expect(const Case& c) { EXPECT_TRUE(computes(on(), c)); }
  void expect_eight_bits(DType kv_dtype, std::uint64_t seed) {
    for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
      for (const bool paged : {false, true})
        for (const auto& [dim, dim_v] : {std::pair{64, 64}, {128, 128}, {80, 40}, {24, 256}})
          for (const auto& masks : std::vector<std::vector<Mask>>{
                   {CausalMask{}}, {SlidingWindowMask{bottom_right, true}}, {TreeMask{}}}) {
            ++seed;
            const DType dtype = seed % 2 ? DType::bf16 : DType::fp16;
            const AttentionSpec spec = decode_spec(dtype, dim, masks,
                                                   {.head_dim_v = dim_v,
                                                    .varlen = seed % 3 == 0,
                                                    .paged = paged,
                                                    .batch_invariant = seed % 5 == 0,
                                                    .kv_dtype = kv_dtype,
                                                    .kv_scale = kv_scale});
            if (!why_unsupported(spec, Target::parse(on().target())).empty() || !takes_next(spec, 5))
              continue;
            Case c{.spec = spec,
                   .batch = 3,
                   .heads_q = 6,
                   .heads_kv = 2,
                   .seqlen_q = seed % 7 == 0 ? 1 : 5,
                   .seqlen_k = 300,
                   .lengths_k = {300, 37, 170},
                   .page_size = paged ? 16 : 0,
                   .layout_kv = static_cast<MemoryLayout>(seed % 4),
                   .seed = seed};
            // Rows of 24 or 40 bytes begin at multiples of 16 only with gaps between them.
            if (on().is_cuda() && (dim % 16 || dim_v % 16)) c.layout_kv = MemoryLayout::padded;
            if (spec.varlen) c.lengths_q = {1, 5, 2};
            expect(c);
          }
  }
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
  const std::vector<int> counts = on().is_cuda() ? std::vector{200} : std::vector{200, 257, 1024};
  for (const int heads_q : counts)
    expect({.spec = decode_spec(DType::bf16, 64, {CausalMask{}}),
            .heads_q = heads_q,
            .heads_kv = 1,
            .seqlen_q = 3,
            .seqlen_k = 700,
            .seed = 3});
}

// A test for each dtype, since on a GPU each compiles 72 kernels.
TEST_P(Decode, Int8Keys) {
  expect_eight_bits(DType::int8, 900);
}
TEST_P(Decode, Fp8E4m3Keys) {
  expect_eight_bits(DType::fp8_e4m3, 972);
}
TEST_P(Decode, Fp8E5m2Keys) {
  expect_eight_bits(DType::fp8_e5m2, 1044);
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

// Many query rows on sm_90a: the forward's kernel, chosen by its block_n.
TEST_P(Decode, ByTheForwardsKernel) {
  if (on().target() != "sm_90a") GTEST_SKIP() << "only sm_90a decodes by the forward's kernel";
  std::uint64_t seed = 150;
  for (const bool paged : {false, true})
    for (const bool varlen : {false, true})
      for (const std::vector<Mask>& mask :
           std::vector<std::vector<Mask>>{{},
                                          {CausalMask{}},
                                          {SlidingWindowMask{bottom_right, true}},
                                          {TreeMask{}},
                                          {CausalMask{}, TreeMask{}}})
        for (const bool packs : {false, true}) {
          if (varlen && !paged) continue;
          AttentionSpec spec = decode_spec(seed % 2 ? DType::bf16 : DType::fp16, seed % 3 ? 128 : 72, mask,
                                           {.varlen = varlen,
                                            .o_dtype = seed % 5 ? std::nullopt : std::optional(DType::fp32),
                                            .paged = paged});
          spec.config.block_n = 64;
          spec.config.pack_gqa = packs;
          Case c{.spec = spec, .heads_q = 8, .heads_kv = 2, .seqlen_k = 500, .seed = ++seed};
          if (varlen)
            c.lengths_q = {1, 64, 0, 33, 7};
          else
            c.batch = 5, c.seqlen_q = 20;
          c.lengths_k = {500, 64, 0, 1, 333};
          if (paged) c.page_size = seed % 4 ? 16 : 64;
          expect(c);
        }
}

// On a GPU with a tile, or two, for nearly every multiprocessor, blocks take whole tiles.
TEST_P(Decode, TilesForAllMultiprocessors) {
  const int count =
      on().is_cuda() && !on().only_prebuilds() ? cuda_device(on().device().index).multiprocessors : 5;
  std::uint64_t seed = 170;
  for (const std::vector<Mask>& mask :
       std::vector<std::vector<Mask>>{{}, {SlidingWindowMask{bottom_right, true}}})
    for (const bool paged : {false, true})
      for (const auto& [batch, length] :
           {std::pair{count, 333}, {count - 1, 64}, {2 * count, 100}, {count, 0}}) {
        AttentionSpec spec = decode_spec(DType::bf16, 128, mask, {.paged = paged});
        if (on().is_cuda()) spec.config = {.block_m = 16, .block_n = 32, .num_stages = 2, .num_warps = 8};
        expect({.spec = spec,
                .batch = batch,
                .heads_q = 4,
                .heads_kv = 1,
                .seqlen_q = 2,
                .seqlen_k = length,
                .page_size = paged ? 16 : 0,
                .masks = verify::MaskDataOptions{},  // none of lengths
                .seed = ++seed});
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
      {CausalMask{}, TreeMask{}},
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
// bits are the same, with batch_invariant for all numbers.
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
  constexpr std::uint64_t seed = 700;
  for (const auto& [paged, invariant] :
       {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    const AttentionSpec spec =
        decode_spec(DType::bf16, 64, {CausalMask{}}, {.paged = paged, .batch_invariant = invariant});
    if (!takes_next(spec)) continue;
    std::map<int, std::vector<std::byte>> bits_of;  // by query rows
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
                                 .seed = seed + static_cast<std::uint64_t>(rows)});
        std::vector<std::byte>& bits = bits_of[rows];
        if (!invariant) bits.clear();
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

// A sequence and others of a batch.
struct Neighbours {
  std::vector<int> rows;    // of each sequence; the same for all where rows are not packed
  int later;                // rows of the first sequence after the one that is compared
  std::vector<int> others;  // lengths of the other sequences
  int page_size;
};

// The compared row is at key `position` of the first sequence. It sees the keys up to its own, or a window.
struct RowAmongOthers {
  RowAmongOthers(TestDevice& device, const AttentionSpec& spec, int position, const Neighbours& batch)
      : workload(device, case_of(spec, position, batch)), row(batch.rows[0] - 1 - batch.later) {
    if (!spec.varlen) row = std::ranges::max(batch.rows) - 1 - batch.later;
    std::vector<std::uint64_t> names = {1000};
    for (std::size_t b = 0; b < batch.others.size(); ++b) names.push_back(b);
    fill_by_position(workload, names, device.is_cuda() ? Values::bell_shaped : Values::weightless_column);
    if (const auto& tree = workload.host_args().tree_bits) {
      auto* const bits = static_cast<std::uint32_t*>(tree->data) + row * tree->strides[1];
      for (int i = 0; i <= row; ++i) bits[i / 32] |= 1u << i % 32;
      workload.tensor(&AttentionArgs::tree_bits).upload();
    }
  }
  static Case case_of(const AttentionSpec& spec, int position, const Neighbours& batch) {
    std::vector<int> lengths_k = {position + 1 + batch.later};
    lengths_k.insert(lengths_k.end(), batch.others.begin(), batch.others.end());
    const int rows = std::ranges::max(batch.rows);
    return {.spec = spec,
            .batch = static_cast<int>(lengths_k.size()),
            .heads_q = 6,
            .heads_kv = 2,
            .seqlen_q = rows,
            .seqlen_k = 4096,
            .lengths_q = spec.varlen ? batch.rows : std::vector<int>{},
            .lengths_k = lengths_k,
            .page_size = spec.paged ? batch.page_size : 0,
            .max_seqlen_q = spec.varlen ? std::optional(rows) : std::nullopt,
            .masks = verify::MaskDataOptions{.lengths_k = lengths_k}};
  }
  std::vector<std::byte> bits(const Kernel& kernel, int window_left) {
    AttentionArgs args = workload.args();
    if (args.window_left) {
      args.window_left = window_left;
      args.window_right = 0;
    }
    if (args.num_sinks) args.num_sinks = 3;
    workload.reset();
    kernel.launch(args);
    return workload.fetch() ? bits_of_row(workload, 0, row) : std::vector<std::byte>{};
  }

  Workload workload;
  int row;
};

// A row alone, and among other rows and sequences, in pages of other sizes, by other tiles and threads: the
// same bits with batch_invariant.
TEST_P(Decode, RowsDoNotDependOnTheRestOfTheBatch) {
  constexpr int position = 3100;
  const std::vector<Neighbours> batches = {{{1}, 0, {}, 16},
                                           {{1}, 0, {}, 256},
                                           {{1, 2, 1, 0}, 0, {5, 900, 0}, 48},
                                           {{3}, 0, {}, 1},
                                           {{3, 1}, 2, {4000}, 16},
                                           {{20}, 0, {}, 16},
                                           {{64, 64}, 63, {100}, 64},
                                           {{40, 1, 1, 1, 1, 1}, 7, {70, 3000, 1, 513, 512}, 16}};
  struct Kind {
    std::vector<Mask> masks;
    SpecOptions options;
  };
  std::vector<Kind> kinds = {
      {{SlidingWindowMask{}},
       {.varlen = true, .o_dtype = DType::fp32, .paged = true, .batch_invariant = true}}};
  if (!on().is_cuda()) {
    const SpecOptions plain = {.batch_invariant = true}, packed = {.varlen = true, .batch_invariant = true};
    const SpecOptions pages = {.o_dtype = DType::fp32, .paged = true, .batch_invariant = true};
    kinds.push_back({{CausalMask{}}, {.head_dim_v = 72, .o_dtype = DType::fp32, .batch_invariant = true}});
    kinds.push_back({{CausalMask{}, SlidingWindowMask{bottom_right, true}}, packed});
    kinds.push_back({{TreeMask{}}, pages});
    kinds.push_back({{CausalMask{}, TreeMask{}}, packed});
    kinds.push_back({{SlidingWindowMask{}}, plain});
    kinds.push_back({{CausalMask{}, SlidingWindowMask{bottom_right, true}}, pages});
  }
  // Threads, and a tile's rows where they are not the engine's choice.
  using Ways = std::vector<std::pair<int, int>>;
  const Ways ways = on().is_cuda() ? Ways{{1, 0}} : Ways{{1, 0}, {2, 16}, {64, 256}};
  std::vector<std::unique_ptr<Engine>> engines;
  for (const auto& [threads, block_m] : ways) engines.push_back(on().make_engine({.num_threads = threads}));
  for (const auto& [masks, options] : kinds)
    for (const DType dtype : own_dtypes()) {
      const AttentionSpec spec = decode_spec(dtype, 64, masks, options);
      if (!takes_next(spec, 6)) continue;
      SCOPED_TRACE(spec.to_json());
      // With the first window rows before the compared one see a part more, with the second one part is seen.
      constexpr int windows[] = {2070, 20};
      std::vector<std::byte> expected[std::size(windows)];
      for (const Neighbours& batch : batches) {
        RowAmongOthers compared(on(), spec, position, batch);
        SCOPED_TRACE(compared.workload.given().str());
        for (std::size_t way = 0; way < ways.size(); ++way) {
          const auto& [threads, block_m] = ways[way];
          AttentionSpec pinned = spec;
          pinned.config.block_m = block_m;
          const Kernel& kernel = block_m == 0 ? compared.workload.kernel(*engines[way])
                                              : engines[way]->get(pinned, compared.workload.given().shape());
          for (std::size_t i = 0; i < std::size(windows); ++i) {
            const std::vector<std::byte> bits = compared.bits(kernel, windows[i]);
            ASSERT_FALSE(bits.empty());
            if (expected[i].empty()) expected[i] = bits;
            EXPECT_TRUE(bits == expected[i])
                << threads << " threads, block_m " << block_m << ", window of " << windows[i];
          }
        }
      }
    }
}

// A value whose scale is far from the others' costs them no precision, whatever it weighs.
TEST_P(Decode, FarScalesOfValues) {
  for (const DType kv_dtype : {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2})
    for (const DType dtype : {DType::bf16, DType::fp16}) {
      const AttentionSpec spec =
          decode_spec(dtype, 64, {CausalMask{}},
                      {.o_dtype = DType::fp32, .kv_dtype = kv_dtype, .kv_scale = KvScale::token_head});
      if (!takes_next(spec)) continue;
      const Case given{.spec = spec,
                       .batch = 2,
                       .heads_q = 8,
                       .heads_kv = 2,
                       .seqlen_q = 5,
                       .seqlen_k = 400,
                       .data = Data::plain};
      try {
        for (const FarScales& far : far_scales(given.seqlen_k)) {
          Workload workload(on(), given);
          set_scales(workload, far.keys);
          workload.kernel(on().engine()).launch(workload.args());
          EXPECT_TRUE(workload.check()) << far.name;
        }
      } catch (const Prebuilt&) {  // the kernel of all scales
      }
    }
}

FLASHJIT_ON_EVERY_DEVICE(Decode);

}  // namespace
}  // namespace flashjit::testing_support
