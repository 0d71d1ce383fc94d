// The forward of the sm_80 family on the host (forward_sm80_emulated.hpp) with heads of more than 256
// columns, whose rows two warps share: each computes half of a block's scores, and every second pair of 8
// columns.
#include "tests/cuda/forward_sm80_emulated.hpp"

namespace flashjit::testing_support {
namespace {

const std::vector<Mask> causal = {CausalMask{}};

// Lengths of keys in pages are random.
Case wide_case(std::uint64_t seed) {
  return {.batch = 2,
          .heads_q = 2,
          .heads_kv = 1,
          .seqlen_q = 45,
          .seqlen_k = 150,
          .page_size = 16,
          .layout = static_cast<MemoryLayout>(seed % 5),
          .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
          .poison = seed % 2 ? Poison::nan : Poison::infinity,
          .seed = seed};
}

// Four and eight warps, halves of 8, 16 and 32 keys, one and two stages; columns of which the last ones are
// one warp's alone; wide keys beside narrow values.
TEST_F(ForwardSm80, WideHeads) {
  expect<SpecOf<Bf16, 512, 512, false, false, BottomRight>, ConfigOf<32, 1, 64, 8>>(wide_case(1), causal);
  expect<SpecOf<Fp16, 264, 264, true, false, BottomRight>, ConfigOf<32, 2, 32, 4>>(wide_case(2), causal);
  expect<SpecOf<Bf16, 8, 576, true, false, BottomRight>, ConfigOf<16, 1, 32, 4>>(wide_case(3), causal);
  expect<SpecOf<Bf16, 576, 8, false, false, BottomRight>, ConfigOf<32, 2, 32, 4>>(wide_case(4), causal);
  expect<SpecOf<Fp16, 280, 272, false, false, BottomRight>, ConfigOf<16, 2, 64, 8>>(wide_case(5), causal);
  expect<SpecOf<Bf16, 40, 312, true, false>, ConfigOf<64, 1, 64, 8>>(wide_case(6), {});
}

TEST_F(ForwardSm80, WideHeadsInPackedRows) {
  Case c = wide_case(11);
  c.batch = 1;
  c.lengths_q = {1, 0, 33, 70};
  c.lengths_k = {150, 20, 33, 100};
  c.spare_rows = 7;
  expect<SpecOf<Bf16, 288, 320, true, true, BottomRight>, ConfigOf<32, 1, 32, 4>>(c, causal);
  expect<WithFloatOutput<SpecOf<Bf16, 264, 328, true, true, device::Tree>>, ConfigOf<16, 1, 64, 8>>(
      c, {TreeMask{}});
}

// Masks whose bits a warp asks for, by blocks of lists that are smaller and larger than halves of keys.
TEST_F(ForwardSm80, WideHeadsUnderMasks) {
  expect<SpecOf<Bf16, 264, 272, true, false, WindowWithSinks>, ConfigOf<16, 1, 32, 4>>(
      wide_case(21), {SlidingWindowMask{bottom_right, true}});
  expect<SpecOf<Bf16, 264, 272, true, false, Window>, ConfigOf<64, 1, 64, 8>>(wide_case(22),
                                                                              {SlidingWindowMask{}});
  expect<SpecOf<Fp16, 272, 264, true, false, device::Padding, device::BlockSparse<16, 32, false>>,
         ConfigOf<32, 1, 64, 8>>(wide_case(23), {PaddingMask{}, BlockSparseMask{16, 32}});
  expect<SpecOf<Fp16, 272, 264, false, false, device::BlockSparse<64, 16, false>>, ConfigOf<32, 1, 32, 4>>(
      wide_case(24), {BlockSparseMask{64, 16}});
  expect<SpecOf<Fp16, 272, 264, false, false, device::BlockSparse<64, 64, false>>, ConfigOf<16, 1, 32, 4>>(
      wide_case(25), {BlockSparseMask{64, 64}});
  expect<SpecOf<Bf16, 264, 264, false, false, device::Tree>, ConfigOf<16, 1, 64, 8>>(wide_case(26),
                                                                                     {TreeMask{}});
}

TEST_F(ForwardSm80, WideHeadsWithDropout) {
  expect<WithDropout<SpecOf<Bf16, 264, 264, false, false, BottomRight>>, ConfigOf<32, 1, 32, 4>>(
      wide_case(31), causal);
  expect<WithDropout<SpecOf<Fp16, 272, 288, true, false, BottomRight>>, ConfigOf<16, 2, 64, 8>>(wide_case(32),
                                                                                                causal);
  expect<WithDropout<SpecOf<Bf16, 264, 24, true, false>>, ConfigOf<64, 2, 64, 8>>(wide_case(33), {});
}

TEST_F(ForwardSm80, WideHeadsWithFormulas) {
  using Spec = SpecOf<Bf16, 264, 280, false, false>;
  expect<WithFormulaSpec<Spec, FormulaParams, true>, ConfigOf<32, 2, 32, 4>>(wide_case(41), {});
  using Paged = SpecOf<Fp16, 272, 264, true, false>;
  expect<WithFormulaSpec<Paged, FormulaParams, false>, ConfigOf<16, 1, 64, 8>>(wide_case(42), {});
  expect_listed<WithLists<Spec, FormulaParams, 16, 16>, ConfigOf<32, 1, 64, 8>>(wide_case(43));
  expect_listed<WithLists<Spec, FormulaParams, 128, 32>, ConfigOf<32, 1, 32, 4>>(wide_case(44));
  Case shard = wide_case(500 + sample_seed() % 50);
  using Params = device::Paged<device::Sm80ForwardParams>;
  expect<WithShard<Spec, Params, device::Causal<Align::top_left>>, ConfigOf<64, 1, 64, 8>>(shard, causal);
  expect<WithShard<Spec, Params, device::BlockSparse<32, 64, false>>, ConfigOf<32, 1, 64, 8>>(
      shard, {BlockSparseMask{32, 64, false}});
}

TEST_F(ForwardSm80, WideHeadsOf8Bits) {
  using enum device::KvScale;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  using Wide = SpecOf<Bf16, 264, 288, true, false, BottomRight>;
  expect<WithKv<Wide, fp8_e4m3, token_head>, ConfigOf<16, 2, 32, 4>>(wide_case(51), causal);
  expect<WithKv<Wide, int8, tensor>, ConfigOf<32, 2, 64, 8>>(wide_case(52), causal);
  expect<WithKv<SpecOf<Fp16, 320, 8, true, false, BottomRight>, fp8_e5m2, head>, ConfigOf<32, 2, 32, 4>>(
      wide_case(53), causal);
  expect<WithKv<SpecOf<Fp16, 40, 328, true, false, BottomRight>, int8, token_head>, ConfigOf<64, 2, 64, 8>>(
      wide_case(54), causal);
}

TEST_F(ForwardSm80, WideValuesInKeys) {
  using Latent = ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, BottomRight>>;
  expect<Latent, ConfigOf<32, 1, 64, 8>>(wide_case(61), causal);
  expect<WithKv<Latent, device::fp8_e4m3, device::KvScale::tensor>, ConfigOf<16, 2, 32, 4>>(wide_case(62),
                                                                                            causal);
  expect<WithKv<Latent, device::int8, device::KvScale::token_head>, ConfigOf<16, 2, 32, 4>>(wide_case(63),
                                                                                            causal);
  using Narrow = ValuesInKeys<SpecOf<Fp16, 72, 40, true, false, BottomRight>>;
  expect<WithKv<Narrow, device::int8, device::KvScale::token_head>, ConfigOf<32, 2, 64, 4>>(wide_case(64),
                                                                                            causal);
}

TEST_F(ForwardSm80, FarKeysOfWideHeads) {
  const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 5, .seqlen_k = 1200};
  using Spec = SpecOf<Fp16, 16, 264, false, false>;
  expect<WithFarKeys<Spec, FormulaParams, false>, ConfigOf<64, 2, 32, 4>>(c, {});
  expect<WithFarKeys<Spec, FormulaParams, true>, ConfigOf<32, 1, 64, 8>>(c, {});
}

TEST_F(ForwardSm80, BatchInvariantBitsOfWideHeads) {
  expect_same_bits<SpecOf<Bf16, 264, 272, true, false, BottomRight>, ConfigOf<64, 1, 64, 8>,
                   ConfigOf<64, 1, 32, 4>>(causal);
}

}  // namespace
}  // namespace flashjit::testing_support
