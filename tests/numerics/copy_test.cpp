// copy_kv against its definition, byte by byte: caches of every kind, rows that change places, slots outside
// the caches. Rows that nothing is copied to keep their bytes.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "codegen/families/kernel_family.hpp"
#include "runtime/cuda/memory.hpp"
#include "tests/support/copy_problem.hpp"

namespace flashjit::testing_support {
namespace {

using From = CopyCase::From;

class CopyKv : public OnEveryDevice {
 protected:
  const Kernel& kernel(const CopyCase& given) { return on().engine().get(given.spec(), given.shape()); }
  testing::AssertionResult computes(const CopyCase& given) {
    CopyProblem copied(on(), given, kernel(given).workspace_bytes(given.shape()));
    kernel(given).launch(copied.args());
    on().synchronize();
    testing::AssertionResult result = copied.check();
    if (result && copied.copied() == 0)
      return testing::AssertionFailure() << given.str() << ": nothing copied";
    return result;
  }
};

constexpr From everywhere[] = {From::others, From::themselves, From::later_pages};

TEST_P(CopyKv, PagesOfAnySize) {
  for (const From from : everywhere)
    for (const int page_size : {1, 7, 16, 48, 100})
      for (const int from_page_size : {1, 16, 37})
        EXPECT_TRUE(computes({.rows = 40,
                              .pages = 200 / page_size + 2,
                              .page_size = page_size,
                              .from_pages = 90 / from_page_size,
                              .from_page_size = from_page_size,
                              .from = from}));
}

// Rows of every number of bytes by which kernels divide one.
TEST_P(CopyKv, HeadDimsAndDTypes) {
  constexpr std::optional<DType> stored[] = {std::nullopt, DType::int8, DType::fp8_e4m3, DType::fp8_e5m2};
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::optional<DType> kv_dtype : stored)
      for (const KvScale kv_scale : {KvScale::tensor, KvScale::head, KvScale::token_head})
        for (const auto& [head_dim, head_dim_v] :
             {std::pair{8, 8}, {72, 40}, {128, 128}, {192, 128}, {576, 512}, {64, 1024}}) {
          if (kv_dtype ? dtype == DType::fp32 : kv_scale != KvScale::tensor) continue;
          for (const From from : {From::others, From::themselves}) {
            // GPU kernels take rows at multiples of 16 bytes.
            const bool padded = on().is_cuda() && kv_dtype && (head_dim % 16 != 0 || head_dim_v % 16 != 0);
            const CopyCase c{.heads = 3,
                             .head_dim = head_dim,
                             .head_dim_v = head_dim_v,
                             .dtype = dtype,
                             .kv_dtype = kv_dtype,
                             .kv_scale = kv_scale,
                             .from = from,
                             .layout = padded ? MemoryLayout::padded : MemoryLayout::contiguous,
                             .from_layout = padded ? MemoryLayout::padded : MemoryLayout::contiguous};
            if (!takes_next(c.spec())) continue;
            EXPECT_TRUE(computes(c));
          }
        }
}

// Latent caches have no V.
TEST_P(CopyKv, LatentCaches) {
  for (const From from : everywhere)
    for (const std::optional<DType> kv_dtype : {std::optional<DType>(), std::optional(DType::fp8_e4m3)})
      for (const KvScale kv_scale : {KvScale::tensor, KvScale::token_head}) {
        if (!kv_dtype && kv_scale != KvScale::tensor) continue;
        EXPECT_TRUE(computes({.page_size = 64,
                              .heads = 1,
                              .head_dim = 576,
                              .head_dim_v = 512,
                              .kv_dtype = kv_dtype,
                              .kv_scale = kv_scale,
                              .v_in_k = true,
                              .from = from}));
      }
}

TEST_P(CopyKv, Layouts) {
  constexpr MemoryLayout layouts[] = {MemoryLayout::heads_first, MemoryLayout::batch_inside,
                                      MemoryLayout::padded, MemoryLayout::sliced_heads, MemoryLayout::odd};
  for (const MemoryLayout layout : layouts)
    for (const MemoryLayout from_layout : layouts)
      for (const From from : {From::others, From::themselves}) {
        if ((layout == MemoryLayout::odd || from_layout == MemoryLayout::odd) && on().is_cuda()) continue;
        EXPECT_TRUE(computes({.kv_dtype = DType::int8,
                              .kv_scale = KvScale::token_head,
                              .from = from,
                              .layout = layout,
                              .from_layout = from_layout}));
      }
}

// More rows than places, rows that take many threads, one head, and a launch of several waves.
TEST_P(CopyKv, ManyRowsAndHeads) {
  for (const From from : everywhere) {
    EXPECT_TRUE(
        computes({.rows = 1500, .pages = 30, .page_size = 64, .heads = 1, .head_dim = 8, .from = from}));
    EXPECT_TRUE(computes({.rows = 2, .pages = 2, .page_size = 2, .heads = 700, .from = from, .wild = false}));
  }
}

// Two rows that change places, and a ring of all rows of a cache: each place is the source of another row.
TEST_P(CopyKv, RowsThatChangePlaces) {
  for (const int rows : {2, 64})
    for (const int step : {1, 17}) {
      const CopyCase c{.rows = rows,
                       .kv_dtype = DType::fp8_e4m3,
                       .kv_scale = KvScale::token_head,
                       .from = From::themselves,
                       .wild = false};
      CopyProblem ring(on(), c, kernel(c).workspace_bytes(c.shape()));
      ring.set_slots([&](int i) { return std::pair<std::int64_t, std::int64_t>{i, (i + step) % rows}; });
      kernel(c).launch(ring.args());
      on().synchronize();
      EXPECT_TRUE(ring.check()) << step;
    }
}

// On a GPU by replays of a captured graph.
TEST_P(CopyKv, ReplaysReadSlotsAnew) {
  for (const From from : everywhere) {
    const CopyCase c{.kv_dtype = DType::int8, .kv_scale = KvScale::token_head, .from = from};
    CopyProblem copied(on(), c, kernel(c).workspace_bytes(c.shape()));
    const PreparedLaunch prepared = kernel(c).prepare(copied.args());
    std::optional<cuda::Graph> graph;
    if (on().is_cuda()) graph.emplace(on().context(), [&](Stream stream) { prepared.launch(stream); });
    for (const unsigned seed : {1u, 2u, 3u}) {
      if (seed > 1) copied.draw(seed);
      graph ? graph->launch() : prepared.launch();
      on().synchronize();
      EXPECT_TRUE(copied.check());
    }
  }
}

TEST_P(CopyKv, NothingToDo) {
  for (const CopyCase& c : {CopyCase{.rows = 0}, {.pages = 0}, {.from_pages = 0}, {.heads = 0}})
    for (const From from : {From::others, From::themselves}) {
      CopyCase given = c;
      given.from = from;
      if (from == From::themselves && given.from_pages == 0) continue;
      const CopyCase known{};
      CopyProblem copied(on(), given, kernel(known).workspace_bytes(known.shape()));
      kernel(known).launch(copied.args());
      on().synchronize();
      EXPECT_TRUE(copied.check());
    }
}

// The contents of the shared place are undefined; all else stays as it is.
TEST_P(CopyKv, WritersOfOneSlotWriteNowhereElse) {
  for (const From from : {From::others, From::themselves}) {
    const CopyCase c{.rows = 200, .from = from};
    CopyProblem copied(on(), c, kernel(c).workspace_bytes(c.shape()));
    copied.share_a_slot();
    kernel(c).launch(copied.args());
    on().synchronize();
    EXPECT_TRUE(copied.check(false));
  }
}

FLASHJIT_ON_EVERY_DEVICE(CopyKv);

}  // namespace
}  // namespace flashjit::testing_support
