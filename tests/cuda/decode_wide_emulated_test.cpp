// The GPU decode's own code on the host (decode_on_gpu.hpp) with heads of more than 256 columns, whose output
// several warps share, and with values that are the first columns of keys.
#include "tests/cuda/decode_on_gpu.hpp"

namespace flashjit::testing_support {
namespace {

constexpr auto tensor = device::KvScale::tensor, head = device::KvScale::head,
               token_head = device::KvScale::token_head;
const std::vector<Mask> causal = {CausalMask{}};

Case wide_case(std::uint64_t seed) {
  return {.batch = 2,
          .heads_q = 5,
          .heads_kv = 1,
          .seqlen_q = 2,
          .seqlen_k = 130,
          .layout = static_cast<MemoryLayout>(seed % 5),
          .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
          .poison = seed % 2 ? Poison::nan : Poison::infinity,
          .seed = seed};
}

// Two and four warps for the columns of a row, of which the last has fewer; one and several groups, and rows
// of several warps.
TEST_F(DecodeOnGpu, WideHeads) {
  expect<SpecOf<Bf16, 264, 264, false, false, BottomRight>, ConfigOf<16, 16, 2, 4>>(wide_case(1), causal);
  expect<SpecOf<Fp16, 512, 512, true, false, BottomRight>, ConfigOf<16, 16, 1, 8>>(wide_case(2), causal);
  expect<SpecOf<Bf16, 320, 576, true, false, BottomRight>, ConfigOf<16, 16, 1, 8>>(wide_case(3), causal);
  // A row alone, whose merge still has a block for each part of its columns.
  Case row = wide_case(5);
  row.heads_q = row.seqlen_q = 1;
  expect_always<SpecOf<Fp16, 512, 512, true, false, BottomRight>, ConfigOf<16, 16, 1, 8>>(row, causal, 5);
  EXPECT_EQ(steps, 2u);
  Case rows = wide_case(4);
  rows.seqlen_q = 9;
  expect<SpecOf<Bf16, 40, 328, true, false, BottomRight>, ConfigOf<32, 16, 1, 12>>(rows, causal);
  expect<Invariant<SpecOf<Bf16, 264, 392, true, false, BottomRight>>, ConfigOf<16, 16, 1, 8>>(wide_case(6),
                                                                                              causal);
  Case packed = wide_case(7);
  packed.lengths_q = {2, 0, 3};
  packed.lengths_k = {130, 7, 60};
  expect<WithFloatOutput<SpecOf<Bf16, 296, 296, false, true, BottomRight>>, ConfigOf<16, 16, 1, 4>>(packed,
                                                                                                    causal);
}

TEST_F(DecodeInvariant, WideHeads) {
  expect_same<SpecOf<Bf16, 24, 264, true, false, BottomRight>, ConfigOf<16, 16, 1, 8>,
              ConfigOf<16, 16, 2, 4>>(causal);
}

TEST_F(DecodeOnGpu, ValuesInKeys) {
  expect<ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, BottomRight>>, ConfigOf<16, 16, 2, 4>>(
      wide_case(11), causal);
  expect<ValuesInKeys<SpecOf<Fp16, 72, 40, false, false, BottomRight>>, ConfigOf<16, 32, 1, 8>>(wide_case(12),
                                                                                                causal);
  // Values whose warps' columns end beyond a key's.
  expect<ValuesInKeys<SpecOf<Bf16, 272, 264, true, false, BottomRight>>, ConfigOf<16, 16, 1, 4>>(
      wide_case(13), causal);
}

TEST_F(DecodeOnGpu, WideHeadsOf8Bits) {
  using Latent = ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, BottomRight>>;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  expect<WithKv<Latent, fp8_e4m3, tensor>, ConfigOf<16, 16, 2, 8>>(wide_case(21), causal);
  expect<WithKv<Latent, int8, token_head>, ConfigOf<16, 16, 1, 12>>(wide_case(22), causal);
  expect<WithKv<Latent, fp8_e4m3, tensor>, ConfigOf<16, 16, 2, 16>>(wide_case(26), causal);
  expect<WithKv<SpecOf<Fp16, 264, 400, false, false, BottomRight>, fp8_e5m2, head>, ConfigOf<16, 16, 2, 8>>(
      wide_case(23), causal);
  Case rows = wide_case(24);
  rows.seqlen_q = 9;
  expect<WithKv<SpecOf<Bf16, 40, 328, true, false, BottomRight>, int8, token_head>, ConfigOf<32, 16, 2, 12>>(
      rows, causal);
  expect<WithKv<ValuesInKeys<SpecOf<Bf16, 64, 48, true, false, BottomRight>>, fp8_e4m3, token_head>,
         ConfigOf<16, 32, 2, 8>>(wide_case(25), causal);
}

// Keys as rows of the products: stored numbers of each kind, widths, one and several tiles and positions,
// pages whose keys lie apart, parts of tiles.
TEST_F(DecodeOnGpu, LatentsWithKeysAsRows) {
  using device::fp8_e4m3, device::fp8_e5m2, device::int8, device::fp8_ds_mla;
  using Latent = ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, BottomRight>>;
  using Config = ConfigOf<16, 64, 2, 12>;
  expect<WithKv<Latent, fp8_e4m3, tensor>, Config>(wide_case(31), causal);
  expect<WithKv<Latent, fp8_ds_mla, tensor>, Config>(wide_case(32), causal);
  Case tiles = wide_case(33);
  tiles.heads_q = 18;
  tiles.seqlen_q = 3;
  tiles.seqlen_k = 300;
  tiles.page_size = 8;
  expect<WithKv<Latent, fp8_ds_mla, tensor>, Config>(tiles, causal, 1);
  expect<WithKv<ValuesInKeys<SpecOf<Fp16, 576, 512, true, false, BottomRight>>, int8, head>, Config>(
      tiles, causal, 7);
  tiles.page_size = 1;
  expect<WithKv<ValuesInKeys<SpecOf<Fp16, 320, 320, false, false, BottomRight>>, fp8_e5m2, head>,
         ConfigOf<16, 64, 3, 12>>(tiles, causal, 30);
  expect<
      WithFloatOutput<WithKv<ValuesInKeys<SpecOf<Bf16, 512, 448, true, false, BottomRight>>, int8, tensor>>,
      ConfigOf<16, 64, 1, 12>>(tiles, causal);
  Case packed = wide_case(34);
  packed.lengths_q = {2, 0, 3, 1};
  packed.lengths_k = {330, 7, 0, 60};
  expect<WithKv<ValuesInKeys<SpecOf<Bf16, 576, 512, true, true, BottomRight>>, fp8_ds_mla, tensor>, Config>(
      packed, causal);
}

TEST_F(DecodeOnGpu, MasksOfLatentsWithKeysAsRows) {
  using device::fp8_e4m3, device::fp8_ds_mla;
  using Config = ConfigOf<16, 64, 2, 12>;
  using Latent = ValuesInKeys<SpecOf<Bf16, 576, 512, true, false>>;
  using Scaled = device::Quantised<device::CudaDecodeParams>;
  Case c = wide_case(41);
  c.seqlen_q = 4;
  c.seqlen_k = 700;
  c.page_size = 48;
  using Windowed = ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, WindowWithSinks>>;
  expect<WithKv<Windowed, fp8_ds_mla, tensor>, Config>(c, {SlidingWindowMask{.sinks = true}});
  expect<WithKv<ValuesInKeys<SpecOf<Bf16, 576, 512, true, false, device::Tree>>, fp8_e4m3, tensor>, Config>(
      c, {TreeMask{}});
  expect<WithFormulaSpec<WithKv<Latent, fp8_e4m3, tensor>, device::WithFormulas<Scaled>, true>, Config>(c,
                                                                                                        {});
  expect<WithFormulaSpec<WithKv<Latent, fp8_ds_mla, tensor>, device::WithFormulas<device::CudaDecodeParams>,
                         false>,
         Config>(c, {});
  expect<WithShard<WithKv<Latent, fp8_e4m3, tensor>, Scaled, device::Causal<Align::top_left>>, Config>(
      c, causal);
}

}  // namespace
}  // namespace flashjit::testing_support
