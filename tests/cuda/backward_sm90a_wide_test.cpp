// sm_90a's backward of heads of more than 256 columns, on the host.
#include "tests/cuda/backward_sm90a_emulated.hpp"
#include "tests/cuda/offset_specs.hpp"
#include "tests/support/documents.hpp"

namespace flashjit::testing_support {
namespace {

using BackwardSm90aWide = BackwardSm90a;

// Whole and partial chunks of columns, in both operands, and sums that one warpgroup has alone.
TEST_F(BackwardSm90aWide, HeadDims) {
  const Case c{.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 140, .seed = 2};
  expect<SpecOf<Bf16, 512, 512, false, BottomRight>, Wide>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 320, 320, false, BottomRight>, Wide>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 264, 8, false>, Wide>(c, {});
  expect<SpecOf<Bf16, 8, 504, false, BottomRight>, Wide>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 376, 72, false, BottomRight>, Wide>(c, {CausalMask{}});
  expect<Deterministic<SpecOf<Bf16, 128, 384, false>>, Wide>(c, {});
}
TEST_F(BackwardSm90aWide, LengthsAroundEdges) {
  std::uint64_t seed = 0;
  for (const int rows : {1, 31, 33, 64, 129})
    for (const int keys : {1, 32, 63, 65, 130}) {
      const Case c{.heads_q = 1,
                   .heads_kv = 1,
                   .seqlen_q = rows,
                   .seqlen_k = keys,
                   .layout = static_cast<MemoryLayout>(seed % 5),
                   .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
                   .seed = seed + 1};
      if (seed++ % 2 == 0)
        expect<SpecOf<Bf16, 72, 264, false, BottomRight>, Wide>(c, {CausalMask{}});
      else
        expect<SpecOf<Fp16, 272, 40, false>, Wide>(c, {});
    }
}
TEST_F(BackwardSm90aWide, PackedSequencesAndGroups) {
  const Case packed{.heads_q = 4,
                    .heads_kv = 2,
                    .lengths_q = {30, 1, 0, 130, 5},
                    .lengths_k = {30, 140, 5, 20, 0},
                    .spare_rows = 7,
                    .seed = 4};
  expect<SpecOf<Bf16, 320, 64, true, BottomRight>, Wide>(packed, {CausalMask{}});
  expect<WithDropout<SpecOf<Fp16, 40, 264, true>>, Wide>(packed, {});
  const Case padded{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 100, .seqlen_k = 150, .seed = 6};
  for (const Poison poison : {Poison::nan, Poison::infinity}) {
    Case c = padded;
    c.poison = poison;
    expect<WithFloatGradients<SpecOf<Bf16, 264, 72, false, BottomRight, device::Padding>>, Wide>(
        c, {CausalMask{}, PaddingMask{}});
  }
}
TEST_F(BackwardSm90aWide, MasksAndDropout) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200, .seed = 10};
  using device::BlockSparse;
  using Plain = SpecOf<Bf16, 264, 24, false, Window>;
  expect<WithDropout<Plain>, Wide>(c, {SlidingWindowMask{}});
  ++c.seed;
  expect<SpecOf<Fp16, 24, 264, false, device::SlidingWindowWithSinks<Align::bottom_right>>, Wide>(
      c, {SlidingWindowMask{bottom_right, true}});
  ++c.seed;
  expect<WithDropout<SpecOf<Bf16, 272, 24, false, device::Tree>>, Wide>(c, {TreeMask{}});
  ++c.seed;
  expect<SpecOf<Bf16, 264, 24, false, BlockSparse<64, 64, false>>, Wide>(c, {BlockSparseMask{64, 64}}, true);
  ++c.seed;
  expect<WithDropout<SpecOf<Fp16, 328, 40, false, BlockSparse<16, 32, true>>>, Wide>(
      c, {BlockSparseMask{16, 32, true}}, true);
  ++c.seed;
  expect<Deterministic<SpecOf<Bf16, 40, 320, false, Window, device::Padding, BlockSparse<80, 112, true>>>,
         Wide>(c, {SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{80, 112, true}}, true);
  c = {.heads_q = 2, .heads_kv = 2, .lengths_q = {100, 60}, .lengths_k = {90, 130}, .seed = 80};
  expect<WithDropout<SpecOf<Bf16, 264, 24, true, BlockSparse<32, 64, false>>>, Wide>(
      c, {BlockSparseMask{32, 64}}, true);
  c.dropout_p = 1;
  expect<WithDropout<SpecOf<Bf16, 264, 24, true, BottomRight>>, Wide>(c, {CausalMask{}});
}
TEST_F(BackwardSm90aWide, ListsOfItsMasks) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 200, .seqlen_k = 200, .seed = 21};
  c.named = documents_of(70, 2, 200);
  using Spec = SpecOf<Bf16, 264, 24, false>;
  expect_listed<ListedDocuments<Spec, 128, 128>, Wide>(c);
  expect_listed<ListedDocuments<Spec, 48, 80>, Wide>(c);
}
// Formulas with and without derivatives, tables and sink logits that learn, beside dropout and lists.
TEST_F(BackwardSm90aWide, Formulas) {
  const Case c{.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 90, .seed = 80};
  expect<WithLearned<SpecOf<Bf16, 264, 64, false>, true, true>, Wide>(c, {});
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Fp16, 40, 264, false, BottomRight>>>, false, true>,
         Wide>(c, {CausalMask{}});
  expect<WithShift<WithDropout<SpecOf<Fp16, 264, 24, false, device::Padding>>>, Wide>(c, {PaddingMask{}});
  expect<
      WithLearned<WithDropout<SpecOf<Bf16, 264, 24, false, device::BlockSparse<64, 64, true>>>, true, true>,
      Wide>(c, {BlockSparseMask{64, 64, true}});
  const Case packed{.heads_q = 1,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70},
                    .lengths_k = {30, 80, 5, 20},
                    .spare_rows = 7,
                    .seed = 90};
  expect<WithLearned<SpecOf<Bf16, 264, 64, true>, true, true>, Wide>(packed, {});
}
TEST_F(BackwardSm90aWide, FarScores) {
  Case c{.batch = 1,
         .heads_q = 2,
         .heads_kv = 1,
         .seqlen_q = 70,
         .seqlen_k = 140,
         .data = Data::plain,
         .seed = 50};
  c.softmax_scale = 1e5f;
  expect<SpecOf<Bf16, 264, 24, false, BottomRight>, Wide>(c, {CausalMask{}});
  expect<WithDropout<SpecOf<Bf16, 320, 24, false>>, Wide>(c, {});
  expect<WithLearned<SpecOf<Bf16, 264, 64, false>, true, false>, Wide>(c, {});
}
TEST_F(BackwardSm90aWide, RowsWithoutGradients) {
  const Case c{.batch = 1,
               .heads_q = 1,
               .heads_kv = 1,
               .seqlen_q = 70,
               .seqlen_k = 140,
               .data = Data::plain,
               .seed = 60};
  const auto stop = [](Workload& workload) { stop_gradients(workload, true); };
  expect<SpecOf<Bf16, 264, 64, false, BottomRight>, Wide>(c, {CausalMask{}}, stop);
}
TEST_F(BackwardSm90aWide, Shards) {
  using Params = device::CudaBackwardParams;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 100, .seqlen_k = 130};
  c.seed = 700 + sample_seed() % 50;
  expect<WithShard<WithDropout<SpecOf<Bf16, 264, 24, false>>, Params, device::Causal<Align::top_left>>, Wide>(
      c, {CausalMask{}});
  expect<WithShard<SpecOf<Bf16, 264, 24, false>, Params, device::BlockSparse<16, 32, true>>, Wide>(
      c, {BlockSparseMask{16, 32, true}});
}

}  // namespace
}  // namespace flashjit::testing_support
