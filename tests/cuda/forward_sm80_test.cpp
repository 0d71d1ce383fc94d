// The forward of the sm_80 family on the host (forward_sm80_emulated.hpp): contiguous keys and keys in pages.
#include "tests/cuda/forward_sm80_emulated.hpp"

namespace flashjit::testing_support {
namespace {

TEST_F(ForwardSm80, BatchInvariantBits) {
  expect_same_bits<SpecOf<Bf16, 64, 64, false, false, BottomRight>, ConfigOf<64, 2>, ConfigOf<64, 1, 128>,
                   ConfigOf<64, 2, 128, 8>>({CausalMask{}});
  expect_same_bits<WithTilt<SpecOf<Bf16, 72, 40, true, false, BottomRight>, FormulaParams, true>,
                   ConfigOf<64, 1>, ConfigOf<64, 2, 128>>({CausalMask{}});
}

TEST_F(ForwardSm80, PageSizes) {
  std::uint64_t seed = 0;
  for (const int page_size : {1, 16, 48, 64, 256}) {
    const Case c{.batch = 3,
                 .heads_q = 2,
                 .seqlen_q = 70,
                 .seqlen_k = 260,
                 .lengths_k = {260, 0, 133},
                 .page_size = page_size,
                 .layout_kv = static_cast<MemoryLayout>(seed % 5),
                 .seed = ++seed};
    expect<SpecOf<Bf16, 24, 72, true, false, BottomRight>, ConfigOf<48, 2>>(c, {CausalMask{}});
    expect<SpecOf<Fp16, 72, 16, true, false, Window>, ConfigOf<32, 1>>(c, {SlidingWindowMask{}});
  }
}

TEST_F(ForwardSm80, PagesOfPackedRows) {
  const Case c{.heads_q = 4,
               .heads_kv = 2,
               .seqlen_k = 150,
               .lengths_q = {1, 0, 33, 90},
               .lengths_k = {150, 20, 33, 100},
               .page_size = 16,
               .spare_rows = 7};
  expect<SpecOf<Bf16, 40, 24, true, true, device::Tree>, ConfigOf<64, 2>>(c, {TreeMask{}});
  expect<SpecOf<Bf16, 40, 24, true, true, BottomRight>, ConfigOf<64, 1>>(c, {CausalMask{}});
}

TEST_F(ForwardSm80, PagesUnderSinksListsAndPadding) {
  std::uint64_t seed = 80;
  for (const int page_size : {2, 16, 80})
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Case c{.batch = 2,
                   .heads_q = 2,
                   .seqlen_q = 40,
                   .seqlen_k = 300,
                   .page_size = page_size,
                   .poison = seed % 2 ? Poison::infinity : Poison::nan,
                   .seed = ++seed};
      expect<SpecOf<Bf16, 24, 40, true, false, WindowWithSinks>, ConfigOf<96, 1>>(
          c, {SlidingWindowMask{bottom_right, true}});
      expect<SpecOf<Fp16, 24, 40, true, false, device::Padding, device::BlockSparse<16, 32, false>>,
             ConfigOf<32, 2>>(c, {PaddingMask{}, BlockSparseMask{16, 32}});
    }
}

// Each dtype and sharing of scales; rows of odd numbers of chunks; lengths that end within a block.
TEST_F(ForwardSm80, EightBitKeysAndValues) {
  using enum device::KvScale;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  Case c{.batch = 2,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 70,
         .seqlen_k = 200,
         .lengths_k = {200, 77},
         .page_size = 16,
         .layout_kv = MemoryLayout::padded,
         .seed = 500};
  using Causal = SpecOf<Bf16, 40, 24, true, false, BottomRight>;
  expect<WithKv<Causal, fp8_e4m3, token_head>, ConfigOf<48, 2>>(c, {CausalMask{}});
  c.page_size = 2;
  expect<WithKv<Causal, int8, tensor>, ConfigOf<64, 2>>(c, {CausalMask{}});
  using Windows = SpecOf<Fp16, 32, 80, true, false, WindowWithSinks>;
  c.page_size = 48;
  expect<WithKv<Windows, fp8_e5m2, head>, ConfigOf<32, 2>>(c, {SlidingWindowMask{bottom_right, true}});
  expect<WithKv<Windows, int8, token_head>, ConfigOf<144, 2>>(c, {SlidingWindowMask{bottom_right, true}});
  c.lengths_q = {3, 70};
  expect<WithKv<SpecOf<Bf16, 128, 64, true, true, device::Tree>, fp8_e5m2, token_head>, ConfigOf<32, 2>>(
      c, {TreeMask{}});
}

TEST_F(ForwardSm80, ContiguousKeys) {
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150};
  expect<SpecOf<Bf16, 40, 24, false, false, BottomRight, device::Padding>, ConfigOf<48, 2>>(
      c, {CausalMask{}, PaddingMask{}});
}

// The bound that the oracle takes (tools/verify/formula.hpp).
TEST(FormulaFunctions, TanhIsWithinItsBound) {
  double worst = 0;
  for (int i = -120000; i <= 120000; ++i) {
    const float x = static_cast<float>(i) * 1e-4f;
    worst = std::max(worst, std::abs(double{tanh(device::Real<float>(x)).v} - std::tanh(double{x})));
  }
  EXPECT_LT(worst, 0x1p-16);
  EXPECT_GT(worst, 0x1p-18);
  for (const float x : {20.0f, 3e38f, device::infinity}) {
    EXPECT_NEAR(tanh(device::Real<float>(x)).v, 1, 0x1p-16);
    EXPECT_NEAR(tanh(device::Real<float>(-x)).v, -1, 0x1p-16);
  }
  EXPECT_NEAR(tanh(device::Real<float>(0.0f)).v, 0, 1e-6);
  EXPECT_TRUE(std::isnan(tanh(device::Real<float>(NAN)).v));
}

// Tiles within blocks, blocks within tiles, and tiles across the edges of blocks.
TEST_F(ForwardSm80, ListsOfItsMasks) {
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 200};
  using Spec = SpecOf<Bf16, 40, 24, false, false>;
  expect_listed<WithLists<Spec, FormulaParams, 128, 32>, ConfigOf<32, 2>>(c);
  expect_listed<WithLists<Spec, FormulaParams, 16, 16>, ConfigOf<48, 1>>(c);
}

// Blocks of keys that are far below a row's later ones.
TEST_F(ForwardSm80, FarKeys) {
  const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 5, .seqlen_k = 1200};
  using Spec = SpecOf<Fp16, 16, 16, false, false>;
  expect<WithFarKeys<Spec, FormulaParams, false>, ConfigOf<64, 2>>(c, {});
  expect<WithFarKeys<Spec, FormulaParams, true>, ConfigOf<64, 2>>(c, {});
}

TEST_F(ForwardSm80, Formulas) {
  Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150};
  using Spec = SpecOf<Bf16, 40, 24, false, false>;
  expect<WithFormulaSpec<Spec, FormulaParams, true>, ConfigOf<48, 2>>(c, {});
  c.seqlen_q = 90, c.seqlen_k = 40;  // the first rows see nothing
  c.page_size = 16;
  using Paged = SpecOf<Fp16, 24, 40, true, false>;
  expect<WithFormulaSpec<Paged, FormulaParams, false>, ConfigOf<32, 1>>(c, {});
}

TEST_F(ForwardSm80, Shards) {
  using Params = device::Paged<device::Sm80ForwardParams>;
  using Base = SpecOf<Bf16, 24, 40, false, false>;
  Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 90, .seqlen_k = 150};
  c.seed = 500 + sample_seed() % 50;
  expect<WithShard<Base, Params, device::Causal<Align::top_left>>, ConfigOf<48, 2>>(c, {CausalMask{}});
  expect<WithShard<Base, Params, device::BlockSparse<32, 64, false>>, ConfigOf<32, 2>>(
      c, {BlockSparseMask{32, 64, false}});
}

}  // namespace
}  // namespace flashjit::testing_support
