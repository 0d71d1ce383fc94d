// append_kv against the float64 oracle: every place that a token may have, and rotary embedding. Rows that no
// token names keep their bits.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "runtime/cuda/memory.hpp"
#include "tests/support/append_problem.hpp"

namespace flashjit::testing_support {
namespace {

class Append : public OnEveryDevice {
 protected:
  const Kernel& kernel(const AppendCase& given) { return on().engine().get(given.spec(), given.shape()); }
  testing::AssertionResult computes(const AppendCase& given) {
    AppendProblem problem(on(), given);
    kernel(given).launch(problem.args());
    on().synchronize();
    testing::AssertionResult result = problem.check();
    if (result && problem.written() == 0)
      return testing::AssertionFailure() << given.str() << ": nothing written";
    return result;
  }
};

TEST_P(Append, PlacesInContiguousAndPagedCaches) {
  for (const int page_size : {0, 1, 2, 16, 48, 256})
    for (const bool packed : {false, true})
      for (const bool by_slots : {false, true}) {
        const AppendCase c{.batch = 5,
                           .seqlen = 9,
                           .rows = 100,
                           .packed = packed,
                           .by_slots = by_slots,
                           .page_size = page_size};
        EXPECT_TRUE(computes(c));
      }
}

TEST_P(Append, HeadDimsAndDTypes) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const auto& [head_dim, head_dim_v] :
         {std::pair{8, 8}, {72, 40}, {128, 128}, {192, 128}, {256, 256}}) {
      const AppendCase c{
          .heads_kv = 3, .heads_q = 6, .head_dim = head_dim, .head_dim_v = head_dim_v, .dtype = dtype};
      if (!takes_next(c.spec())) continue;
      EXPECT_TRUE(computes(c));
    }
}

TEST_P(Append, Rotary) {
  for (const RotaryStyle style : {RotaryStyle::half, RotaryStyle::interleaved})
    for (const int dim : {0, 2, 6, 20, 48, 64, 88})
      for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
        const AppendCase c{
            .head_dim = 96, .dtype = dtype, .rotary = Rotary{.style = style, .dim = dim, .q = dim % 4 == 0}};
        if (!takes_next(c.spec())) continue;
        EXPECT_TRUE(computes(c));
      }
}

// Latent caches: one head, V its first columns, rotary of the last ones.
TEST_P(Append, LatentCaches) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const RotaryStyle style : {RotaryStyle::half, RotaryStyle::interleaved})
      for (const int page_size : {0, 64}) {
        const AppendCase c{.batch = 3,
                           .seqlen = 9,
                           .rows = 100,
                           .heads_kv = 1,
                           .heads_q = 16,
                           .head_dim = 576,
                           .head_dim_v = 512,
                           .dtype = dtype,
                           .v_in_k = true,
                           .packed = style == RotaryStyle::half,
                           .by_slots = dtype == DType::fp16,
                           .page_size = page_size,
                           .rotary = Rotary{.style = style, .first = 512, .q = true}};
        if (!takes_next(c.spec())) continue;
        EXPECT_TRUE(computes(c));
      }
}

// Keys of 656 bytes, with a scale for each 128 columns.
TEST_P(Append, DsMla) {
  AppendCase c{.batch = 3,
               .seqlen = 9,
               .rows = 100,
               .heads_kv = 1,
               .heads_q = 16,
               .head_dim = 576,
               .head_dim_v = 512,
               .kv_dtype = DType::fp8_ds_mla,
               .v_in_k = true};
  if (!why_unsupported(c.spec(), Target::parse(on().target())).empty()) return;
  for (const bool by_slots : {false, true})
    for (const int page_size : {0, 64})
      for (const std::optional<Rotary>& rotary :
           {std::optional<Rotary>(),
            {Rotary{.first = 512, .q = true}},
            {Rotary{.style = RotaryStyle::interleaved, .first = 512, .q = true}},
            // Whole rows, which no engine asks for.
            {Rotary{.dim = 64, .tables = DType::fp32}}})
        for (const bool hard_rows : {false, true}) {
          c.packed = c.by_slots = by_slots;
          c.page_size = page_size;
          c.rotary = rotary;
          c.hard_rows = hard_rows && (!rotary || rotary->first);  // nothing is known of rotated infinity
          c.layout = page_size ? MemoryLayout::contiguous : MemoryLayout::heads_first;
          if (!takes_next(c.spec(), 3)) continue;
          EXPECT_TRUE(computes(c));
        }
}

// Columns before and after the rotated ones keep their bits.
TEST_P(Append, RotaryInTheMiddle) {
  for (const RotaryStyle style : {RotaryStyle::half, RotaryStyle::interleaved})
    for (const auto& [first, dim] : {std::pair{8, 0}, {40, 20}, {64, 32}, {88, 6}})
      for (const bool in_place : {false, true})
        EXPECT_TRUE(computes({.head_dim = 96,
                              .rotary = Rotary{.style = style, .first = first, .dim = dim, .q = true},
                              .in_place = in_place}));
}

TEST_P(Append, RotaryPositionsOfTheirOwn) {
  for (const bool by_slots : {false, true})
    for (const bool packed : {false, true})
      EXPECT_TRUE(computes({.packed = packed,
                            .by_slots = by_slots,
                            .page_size = 16,
                            .rotary = Rotary{.q = true},
                            .own_positions = true}));
}

// Float32 shows the angles' own error: at far positions, with large and small bases and scales.
TEST_P(Append, RotaryAtFarPositions) {
  for (const auto& [base, scale] : {std::pair{1e4, 1.0}, {5e5, 8.0}, {1e7, 1.0}, {1.5, 0.01}})
    EXPECT_TRUE(computes({.seqlen = 40,
                          .dtype = DType::fp32,
                          .rotary = Rotary{.q = true},
                          .own_positions = true,
                          .longest_position = 0x7fffffff,
                          .base = base,
                          .scale = scale}));
}

TEST_P(Append, RotaryTables) {
  for (const DType dtype : {DType::bf16, DType::fp32})
    for (const DType tables : {DType::fp32, dtype})
      for (const RotaryStyle style : {RotaryStyle::half, RotaryStyle::interleaved})
        for (const int dim : {0, 24})
          EXPECT_TRUE(computes({.dtype = dtype,
                                .rotary = Rotary{.style = style, .dim = dim, .q = true, .tables = tables},
                                .own_positions = true}));
}

TEST_P(Append, QueriesInPlace) {
  for (const RotaryStyle style : {RotaryStyle::half, RotaryStyle::interleaved})
    for (const int dim : {0, 20})
      EXPECT_TRUE(
          computes({.seqlen = 7, .rotary = Rotary{.style = style, .dim = dim, .q = true}, .in_place = true}));
}

TEST_P(Append, Layouts) {
  for (const MemoryLayout layout : {MemoryLayout::heads_first, MemoryLayout::batch_inside,
                                    MemoryLayout::padded, MemoryLayout::sliced_heads, MemoryLayout::odd}) {
    if (layout == MemoryLayout::odd && on().is_cuda()) continue;
    for (const int page_size : {0, 16})
      EXPECT_TRUE(computes({.page_size = page_size, .rotary = Rotary{.q = true}, .layout = layout}));
  }
}

TEST_P(Append, ManyTokensAndHeads) {
  EXPECT_TRUE(computes({.batch = 3, .seqlen = 700, .rows = 1000, .head_dim = 16}));
  EXPECT_TRUE(computes({.batch = 1,
                        .seqlen = 2,
                        .heads_kv = 700,
                        .heads_q = 1400,
                        .head_dim = 8,
                        .rotary = Rotary{.q = true},
                        .wild = false}));
}

constexpr DType all_kv_dtypes[] = {DType::int8, DType::fp8_e4m3, DType::fp8_e5m2};
constexpr KvScale all_kv_scales[] = {KvScale::tensor, KvScale::head, KvScale::token_head};

// Head dimensions whose rows take a part of a warp, all of it, and several items of its threads.
TEST_P(Append, QuantisedCaches) {
  std::vector<AppendCase> cases = {
      {.heads_kv = 3, .heads_q = 6, .head_dim = 80, .head_dim_v = 48, .rotary = Rotary{.dim = 48, .q = true}},
      {.batch = 3,
       .seqlen = 9,
       .head_dim = 128,
       .packed = true,
       .by_slots = true,
       .page_size = 16,
       .rotary = Rotary{.style = RotaryStyle::interleaved, .q = true, .tables = DType::fp32}},
      {.head_dim = 256, .head_dim_v = 16, .rotary = Rotary{.dim = 6}},
      {.head_dim = 576, .head_dim_v = 512, .rotary = Rotary{.dim = 64}},
      {.heads_kv = 1,
       .head_dim = 576,
       .head_dim_v = 512,
       .v_in_k = true,
       .page_size = 64,
       .rotary = Rotary{.style = RotaryStyle::interleaved, .first = 512, .q = true}},
      {.head_dim = 1024, .head_dim_v = 264, .rotary = Rotary{.style = RotaryStyle::interleaved, .dim = 256}},
      {.dtype = DType::fp16,
       .page_size = 48,
       .rotary = Rotary{.style = RotaryStyle::interleaved, .dim = 20},
       .layout = MemoryLayout::heads_first}};
  for (AppendCase& c : cases)
    for (const DType kv_dtype : all_kv_dtypes)
      for (const KvScale kv_scale : all_kv_scales) {
        c.kv_dtype = kv_dtype;
        c.kv_scale = kv_scale;
        if (!why_unsupported(c.spec(), Target::parse(on().target())).empty() || !takes_next(c.spec()))
          continue;
        EXPECT_TRUE(computes(c));
      }
}

// NaN, infinity, tiny and huge numbers, and scales that count as 0 or whose reciprocal float32 has not.
TEST_P(Append, QuantisedHardRows) {
  for (const DType kv_dtype : all_kv_dtypes)
    for (const KvScale kv_scale : {KvScale::head, KvScale::token_head})
      EXPECT_TRUE(computes({.seqlen = 16,
                            .heads_kv = 3,
                            .heads_q = 3,
                            .kv_dtype = kv_dtype,
                            .kv_scale = kv_scale,
                            .hard_rows = true}));
}

// On a GPU by replays of a captured graph.
TEST_P(Append, ReplaysReadPlacesAnew) {
  for (const AppendCase& c :
       {AppendCase{.by_slots = true, .page_size = 16, .rotary = Rotary{.q = true}},
        {.kv_dtype = DType::int8, .kv_scale = KvScale::token_head, .packed = true, .page_size = 16},
        {.kv_dtype = DType::fp8_e4m3,
         .kv_scale = KvScale::head,
         .rotary = Rotary{},
         .own_positions = true}}) {
    AppendProblem problem(on(), c);
    const PreparedLaunch prepared = kernel(c).prepare(problem.args());
    std::optional<cuda::Graph> graph;
    if (on().is_cuda()) graph.emplace(on().context(), [&](Stream stream) { prepared.launch(stream); });
    for (const unsigned seed : {1u, 2u, 3u}) {
      if (seed > 1) problem.draw_again(seed);
      graph ? graph->launch() : prepared.launch();
      on().synchronize();
      EXPECT_TRUE(problem.check());
      EXPECT_GT(problem.written(), 0) << c.str();
    }
  }
}

TEST_P(Append, NothingToDo) {
  for (const AppendCase& c :
       {AppendCase{.batch = 0}, {.seqlen = 0}, {.rows = 0}, {.heads_kv = 0, .heads_q = 0}}) {
    AppendProblem problem(on(), c);
    const AppendCase known{};
    kernel(known).launch(problem.args());
    on().synchronize();
    EXPECT_TRUE(problem.check()) << c.str();
    EXPECT_EQ(problem.written(), 0);
  }
}

// The contents of the shared row are undefined; all else stays as it is.
TEST_P(Append, WritersOfOneSlotWriteNowhereElse) {
  const AppendCase c{.batch = 8, .seqlen = 32, .by_slots = true, .page_size = 16, .wild = false};
  AppendProblem problem(on(), c);
  problem.share_a_slot();
  const std::vector<std::byte> before = problem.caches();
  kernel(c).launch(problem.args());
  on().synchronize();
  EXPECT_TRUE(problem.check(false));
  const std::vector<std::byte> after = problem.caches();
  const std::size_t row = std::size_t{2} * 64 * 2, rows_of_k = after.size() / row / 2;
  for (std::size_t i = 0; i < after.size(); ++i)
    if (i / row % rows_of_k != 3) {
      ASSERT_EQ(after[i], before[i]) << i;
    }
}

FLASHJIT_ON_EVERY_DEVICE(Append);

}  // namespace
}  // namespace flashjit::testing_support
