// The sm_90a backward's own code on the host, against the float64 oracle: rows, heads, lengths, masks and
// dropout without a GPU.
#include <tuple>

#include "tests/cuda/backward_sm90a_emulated.hpp"
#include "tests/support/documents.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

// Formulas with and without derivatives, what they learn, and masks that are tested or intervals: beside the
// heads of a group, dropout, packed sequences, block lists, and with dQ by its own kernel.
TEST_F(BackwardSm90a, Formulas) {
  Case c{.batch = 1, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150, .seed = 80};
  using Plain = SpecOf<Bf16, 64, 64, false>;
  expect<WithLearned<Plain, true, true>, ConfigOf<64, 2>>(c, {});
  ++c.seed;
  c.heads_q = 2;
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Fp16, 64, 64, false, BottomRight>>>, false, true>,
         ConfigOf<64, 2>>(c, {CausalMask{}});
  ++c.seed;
  expect<WithShift<WithDropout<SpecOf<Fp16, 64, 64, false, device::Padding>>>, ConfigOf<128, 2>>(
      c, {PaddingMask{}});
  ++c.seed;
  expect<WithLearned<SpecOf<Fp16, 64, 64, false, device::BlockSparse<64, 64, true>>, true, false>,
         ConfigOf<128, 2>>(c, {BlockSparseMask{.block_m = 64, .block_n = 64, .per_head = true}});
  const Case packed{.heads_q = 1,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70},
                    .lengths_k = {30, 80, 5, 20},
                    .spare_rows = 7,
                    .seed = 90};
  expect<WithLearned<SpecOf<Bf16, 64, 64, true>, true, true>, ConfigOf<64, 2>>(packed, {});
}

// These weights are subnormal in half precision: dropout's scale must not multiply what they lost.
TEST_F(BackwardSm90a, DropoutOfTinyWeights) {
  const Case c{.heads_q = 2,
               .heads_kv = 2,
               .seqlen_q = 3,
               .seqlen_k = 300,
               .softmax_scale = 1.0f,
               .dropout_p = 0.95,
               .seed = 61};
  expect<WithLearned<WithDropout<SpecOf<Fp16, 64, 64, false>>, true, false>, ConfigOf<64, 2>>(c, {});
}

// Lengths around the edges of blocks of rows and of keys, in each form of dQ's product.
TEST_F(BackwardSm90a, LengthsAroundEdges) {
  std::uint64_t seed = 0;
  for (const int rows : {1, 63, 64, 65, 128, 129, 200})
    for (const int keys : {1, 64, 127, 128, 130, 257}) {
      const Case c{.heads_q = 2,
                   .heads_kv = 2,
                   .seqlen_q = rows,
                   .seqlen_k = keys,
                   .layout = static_cast<MemoryLayout>(seed % 5),
                   .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
                   .seed = seed + 1};
      switch (seed++ % 4) {
        case 0:
          expect<SpecOf<Bf16, 64, 64, false>, ConfigOf<128, 2>>(c, {});
          break;
        case 1:
          expect<SpecOf<Fp16, 128, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
          break;
        case 2:
          expect<SpecOf<Fp16, 64, 40, false, TopLeft>, ConfigOf<64, 2>>(c, {CausalMask{top_left}});
          break;
        case 3:
          expect<Deterministic<SpecOf<Bf16, 72, 64, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
          break;
      }
    }
}

TEST_F(BackwardSm90a, HeadDims) {
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 140};
  expect<SpecOf<Bf16, 8, 8, false, BottomRight>, ConfigOf<128, 2>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 40, 24, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 8, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 72, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 96, 80, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<Deterministic<SpecOf<Bf16, 120, 120, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
}
// One consumer computes all of dQ.
TEST_F(BackwardSm90a, FewKeys) {
  for (const auto& [rows, keys] : {std::pair{49, 49}, {150, 64}, {70, 140}, {1, 1}}) {
    const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = rows, .seqlen_k = keys, .seed = 11};
    expect<SpecOf<Bf16, 32, 32, false>, FewKeys>(c, {});
    expect<SpecOf<Fp16, 64, 40, false, BottomRight>, FewKeys>(c, {CausalMask{}});
    expect<Deterministic<SpecOf<Bf16, 64, 64, false, BottomRight>>, FewKeys>(c, {CausalMask{}});
    expect<WithDropout<SpecOf<Bf16, 8, 64, false, BottomRight, device::Padding>>, FewKeys>(
        c, {CausalMask{}, PaddingMask{}});
    expect<SpecOf<Bf16, 64, 64, false, device::BlockSparse<16, 32, true>>, FewKeys>(
        c, {BlockSparseMask{16, 32, true}}, true);
    expect<WithLearned<WithDropout<SpecOf<Bf16, 64, 64, false>>, true, true>, FewKeys>(c, {});
  }
  const Case packed{.heads_q = 2,
                    .heads_kv = 1,
                    .lengths_q = {30, 1, 0, 70, 5},
                    .lengths_k = {30, 64, 5, 20, 0},
                    .spare_rows = 7,
                    .seed = 12};
  expect<SpecOf<Bf16, 64, 64, true, BottomRight>, FewKeys>(packed, {CausalMask{}});
}
// A consumer's dQ has two parts.
TEST_F(BackwardSm90a, WideKeysAndNarrowValues) {
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 140};
  expect<SpecOf<Fp16, 176, 72, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 248, 8, false>, ConfigOf<64, 2>>(c, {});
}
// Blocks of the grid make either dK or dV, or both in two tiles of rows.
TEST_F(BackwardSm90a, WideHeads) {
  // An even seed divides groups where a block makes both sums.
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 140, .seed = 2};
  expect<SpecOf<Bf16, 256, 256, false, BottomRight>, ConfigOf<64, 1>>(c, {CausalMask{}});
  expect<SpecOf<Fp16, 192, 128, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<SpecOf<Bf16, 136, 160, false>, ConfigOf<64, 1>>(c, {});
  expect<SpecOf<Bf16, 40, 224, false, BottomRight, device::Padding>, ConfigOf<64, 2>>(
      c, {CausalMask{}, PaddingMask{}});
  expect<Deterministic<SpecOf<Fp16, 200, 72, false, BottomRight>>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithDropout<SpecOf<Bf16, 160, 256, false, BottomRight>>, ConfigOf<64, 1>>(c, {CausalMask{}});
  const Case packed{
      .heads_q = 4, .heads_kv = 2, .lengths_q = {30, 1, 0, 130}, .lengths_k = {30, 140, 5, 20}, .seed = 4};
  expect<SpecOf<Bf16, 256, 72, true, BottomRight>, ConfigOf<64, 1>>(packed, {CausalMask{}});
  // Block lists look at the rows of several blocks, each of which takes the place of an earlier one.
  const Case longer{.heads_q = 1, .heads_kv = 1, .seqlen_q = 330, .seqlen_k = 40, .seed = 5};
  const std::vector<Mask> lists = {BlockSparseMask{16, 32, true}};
  expect<SpecOf<Fp16, 184, 104, false, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(longer, lists,
                                                                                            true);
  const Case padded{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 300, .seqlen_k = 150, .seed = 6};
  expect<Deterministic<
             SpecOf<Bf16, 248, 40, false, Window, device::Padding, device::BlockSparse<80, 112, true>>>,
         ConfigOf<64, 2>>(padded, {SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{80, 112, true}}, true);
}

// More key blocks than those at the end of the grid, where all blocks that make dV come after those that make
// dK.
TEST_F(BackwardSm90a, ManyBlocksOfWideHeads) {
  const Case c{.batch = 1, .heads_q = 40, .heads_kv = 40, .seqlen_q = 10, .seqlen_k = 520, .seed = 7};
  expect<SpecOf<Bf16, 8, 256, false>, ConfigOf<64, 1>>(c, {});
}

// Dropout beside derivatives of scores, where blocks make either dK or dV, or both in two tiles of rows: the
// ways to make a weight, and to know that it is dropped, differ.
TEST_F(BackwardSm90a, WideHeadsDropBesideDerivatives) {
  const Case c{.batch = 1, .heads_q = 1, .heads_kv = 1, .seqlen_q = 65, .seqlen_k = 70, .seed = 30};
  const Case packed{
      .heads_q = 1, .heads_kv = 1, .lengths_q = {5, 0, 66}, .lengths_k = {30, 5, 70}, .seed = 31};
  const std::vector<Mask> causal = {CausalMask{}};
  expect<WithLearned<WithDropout<SpecOf<Bf16, 136, 136, false>>, true, true>, ConfigOf<64, 1>>(c, {});
  expect<WithLearned<WithDropout<SpecOf<Fp16, 192, 128, false, BottomRight>>, true, true>, ConfigOf<64, 2>>(
      c, causal);
  expect<WithLearned<WithDropout<SpecOf<Fp16, 200, 80, true, BottomRight>>, false, true>, ConfigOf<64, 1>>(
      packed, causal);
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Bf16, 64, 256, false>>>, false, true>, ConfigOf<64, 2>>(
      c, {});
  expect<WithLearned<WithDropout<SpecOf<Fp16, 256, 64, false, device::Padding>>, true, true>,
         ConfigOf<64, 1>>(c, {PaddingMask{}});
  expect<
      WithLearned<WithDropout<SpecOf<Bf16, 256, 256, false, device::BlockSparse<64, 64, true>>>, true, true>,
      ConfigOf<64, 1>>(c, {BlockSparseMask{64, 64, true}});
  expect<WithLearned<Deterministic<WithDropout<SpecOf<Bf16, 192, 128, false, Window>>>, false, true>,
         ConfigOf<64, 2>>(c, {SlidingWindowMask{}});
}

TEST_F(BackwardSm90a, GroupedHeadsAndPackedSequences) {
  for (const auto& [heads_q, heads_kv] : {std::pair{3, 3}, {6, 2}, {5, 1}}) {
    const Case fixed{
        .batch = 2, .heads_q = heads_q, .heads_kv = heads_kv, .seqlen_q = 140, .seqlen_k = 140, .seed = 3};
    const Case packed{.heads_q = heads_q,
                      .heads_kv = heads_kv,
                      .lengths_q = {30, 1, 0, 170, 5},
                      .lengths_k = {30, 180, 5, 20, 0},
                      .spare_rows = 7,
                      .seed = 4};
    expect<SpecOf<Bf16, 24, 40, false, BottomRight>, ConfigOf<128, 2>>(fixed, {CausalMask{}});
    expect<SpecOf<Bf16, 24, 40, true, BottomRight>, ConfigOf<128, 2>>(packed, {CausalMask{}});
    expect<SpecOf<Fp16, 72, 24, true>, ConfigOf<64, 2>>(packed, {});
    expect<Deterministic<SpecOf<Fp16, 72, 24, true, BottomRight>>, ConfigOf<64, 2>>(packed, {CausalMask{}});
  }
}

// Every mask, without and with dropout. The three forms of dQ take turns: its rows are divided among
// consumers, its columns are, or a kernel of its own computes it.
template <int turn, class... Masks>
struct InTurn {
  using Columns = SpecOf<Fp16, 72, 24, false, Masks...>;
  using Rows = SpecOf<Bf16, 24, 40, false, Masks...>;
  using Plain = std::tuple_element_t<turn % 3, std::tuple<Rows, Columns, Deterministic<Rows>>>;
  using Dropping =
      WithDropout<std::tuple_element_t<turn % 3, std::tuple<Columns, Deterministic<Columns>, Rows>>>;
  template <class Spec>
  using ConfigFor = ConfigOf<Spec::head_dim == 24 ? 128 : 64, 2>;
};
TEST_F(BackwardSm90a, MasksAndDropout) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200};
  const auto test = [&]<int turn, class... Masks>(const std::vector<Mask>& masks) {
    using In = InTurn<turn, Masks...>;
    using Plain = typename In::Plain;
    using Dropping = typename In::Dropping;
    for (const Poison poison : {Poison::nan, Poison::infinity}) {
      ++c.seed;
      c.poison = poison;
      expect<Plain, typename In::template ConfigFor<Plain>>(c, masks);
    }
    expect<Dropping, typename In::template ConfigFor<Dropping>>(c, masks);
  };
  using device::BlockSparse;
  using device::Padding;
  test.operator()<0, Window>({SlidingWindowMask{}});
  test.operator()<1, device::SlidingWindowWithSinks<Align::bottom_right>>(
      {SlidingWindowMask{bottom_right, true}});
  test.operator()<2, Padding>({PaddingMask{}});
  test.operator()<0, BottomRight, Padding>({CausalMask{}, PaddingMask{}});
  test.operator()<1, BlockSparse<64, 64, false>>({BlockSparseMask{64, 64}});
  test.operator()<2, BlockSparse<32, 128, true>>({BlockSparseMask{32, 128, true}});
  test.operator()<0, BlockSparse<128, 128, false>>({BlockSparseMask{128, 128}});
  test.operator()<1, Window, Padding, BlockSparse<16, 32, false>>(
      {SlidingWindowMask{}, PaddingMask{}, BlockSparseMask{16, 32}});
  test.operator()<2, device::Tree>({TreeMask{}});
}
// Some blocks have bitmasks, the masks test others; tiles are within a listed block or have parts of several.
TEST_F(BackwardSm90a, ListsOfItsMasks) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 300, .seqlen_k = 300, .seed = 21};
  c.named = documents_of(70, 2, 300);
  using Spec = SpecOf<Bf16, 40, 24, false>;
  expect_listed<ListedDocuments<Spec, 128, 128>, ConfigOf<64, 2>>(c);
  expect_listed<ListedDocuments<Spec, 128, 128>, ConfigOf<128, 2>>(c);
  expect_listed<ListedDocuments<Spec, 64, 32>, FewKeys>(c);
  expect_listed<ListedDocuments<Spec, 64, 16>, ConfigOf<128, 2>>(c);
  expect_listed<ListedDocuments<Spec, 48, 80>, ConfigOf<64, 2>>(c);
}
// NaN and infinity reach no gradient through a pair that a mask with block lists drops, in blocks that are
// smaller than tiles and in parts of them.
TEST_F(BackwardSm90a, DroppedPairsHideNotANumber) {
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200, .seed = 70};
  using device::BlockSparse;
  using Lists = SpecOf<Fp16, 24, 40, false, BlockSparse<16, 32, true>>;
  const std::vector<Mask> lists = {BlockSparseMask{16, 32, true}};
  expect<Lists, ConfigOf<128, 2>>(c, lists, true);
  ++c.seed;
  expect<Deterministic<Lists>, ConfigOf<64, 2>>(c, lists, true);
  ++c.seed;
  expect<SpecOf<Bf16, 72, 24, false, BottomRight, device::Padding, BlockSparse<64, 64, false>>,
         ConfigOf<64, 2>>(c, {CausalMask{}, PaddingMask{}, BlockSparseMask{64, 64}}, true);
  c = {.heads_q = 2, .heads_kv = 2, .lengths_q = {100, 60}, .lengths_k = {90, 130}, .seed = 80};
  expect<WithDropout<SpecOf<Bf16, 24, 24, true, BlockSparse<32, 64, false>>>, ConfigOf<128, 2>>(
      c, {BlockSparseMask{32, 64}}, true);
}
TEST_F(BackwardSm90a, DropoutOfPackedSequences) {
  const Case c{.heads_q = 6,
               .heads_kv = 2,
               .lengths_q = {30, 1, 0, 170},
               .lengths_k = {30, 180, 5, 20},
               .spare_rows = 7,
               .seed = 4};
  expect<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>, ConfigOf<128, 2>>(c, {CausalMask{}});
  // All weights drop, and dlse still has gradients.
  Case certain = c;
  certain.dropout_p = 1;
  expect<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>, ConfigOf<128, 2>>(certain, {CausalMask{}});
  expect<Deterministic<WithDropout<SpecOf<Bf16, 64, 64, true, BottomRight>>>, ConfigOf<64, 2>>(
      c, {CausalMask{}});
}

// Some rows have an lse beyond what float32 holds to a weight's precision, beside rows that have none, in
// each way to make weights.
TEST_F(BackwardSm90a, FarScores) {
  Case c{.batch = 1,
         .heads_q = 2,
         .heads_kv = 1,
         .seqlen_q = 70,
         .seqlen_k = 140,
         .data = Data::plain,
         .seed = 50};
  const std::vector<Mask> causal = {CausalMask{}};
  c.softmax_scale = 2000;
  expect<SpecOf<Bf16, 64, 64, false, BottomRight>, ConfigOf<128, 2>>(c, causal);
  c.softmax_scale = 300;
  expect<SpecOf<Fp16, 72, 24, false, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(
      c, {BlockSparseMask{16, 32, true}});
  c.softmax_scale = 1e5f;
  expect<Deterministic<WithDropout<SpecOf<Bf16, 24, 40, false, BottomRight>>>, ConfigOf<64, 2>>(c, causal);
  expect<WithLearned<SpecOf<Bf16, 64, 64, false>, true, false>, ConfigOf<64, 2>>(c, {});
  expect<SpecOf<Fp16, 192, 128, false, BottomRight>, ConfigOf<64, 2>>(c, causal);
  expect<WithDropout<SpecOf<Bf16, 256, 72, false>>, ConfigOf<64, 1>>(c, {});
  expect<WithShift<Deterministic<SpecOf<Fp16, 64, 64, false>>>, ConfigOf<64, 2>>(c, {});
  Case packed{
      .heads_q = 2, .heads_kv = 1, .lengths_q = {30, 1, 0, 70}, .lengths_k = {30, 80, 5, 20}, .seed = 51};
  packed.softmax_scale = 1e4f;
  expect<SpecOf<Bf16, 64, 64, true, BottomRight>, ConfigOf<64, 2>>(packed, causal);
}

// Rows without a gradient give none, whatever their lse is.
TEST_F(BackwardSm90a, RowsWithoutGradients) {
  const Case c{.batch = 1,
               .heads_q = 1,
               .heads_kv = 1,
               .seqlen_q = 70,
               .seqlen_k = 140,
               .data = Data::plain,
               .seed = 60};
  const auto stop = [](Workload& workload) { stop_gradients(workload, true); };
  expect<SpecOf<Bf16, 64, 64, false, BottomRight>, ConfigOf<64, 2>>(c, {CausalMask{}}, stop);
}

TEST_F(BackwardSm90a, FloatGradients) {
  // A work tile has two of the four heads, where a block makes both sums.
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 130, .seed = 2};
  expect<WithFloatGradients<SpecOf<Bf16, 24, 40, false, BottomRight, device::Padding>>, ConfigOf<128, 2>>(
      c, {CausalMask{}, PaddingMask{}});
  expect<Deterministic<WithFloatGradients<SpecOf<Fp16, 72, 24, false, BottomRight>>>, ConfigOf<64, 2>>(
      c, {CausalMask{}});
}

TEST_F(BackwardSm90a, Shards) {
  using Params = device::CudaBackwardParams;
  using Base = SpecOf<Bf16, 64, 64, false>;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 200};
  c.seed = 700 + sample_seed() % 50;
  using Causal = device::Causal<Align::top_left>;
  expect<WithShard<WithDropout<Base>, Params, Causal>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithShard<Deterministic<WithDropout<Base>>, Params, Causal>, ConfigOf<64, 2>>(c, {CausalMask{}});
  expect<WithShard<Base, Params, device::SlidingWindowWithSinks<Align::top_left>>, ConfigOf<128, 2>>(
      c, {SlidingWindowMask{.sinks = true}});
  expect<WithShard<Base, Params, device::BlockSparse<16, 32, true>>, ConfigOf<64, 2>>(
      c, {BlockSparseMask{16, 32, true}});
}

}  // namespace
}  // namespace flashjit::testing_support
