// How the sm_90a forward shares tiles among query heads: apart, packed, and with rows that belong to no head.
#include "tests/cuda/forward_sm90a_emulated.hpp"

namespace flashjit::testing_support {
namespace {

TEST_F(ForwardSm90a, HeadsApart) {
  expect_gqa<SpecOf<Bf16, 24, 40, false, BottomRight>, ConfigOf<64, 32, true, false, sections>>(
      {CausalMask{}}, {1, 70}, 50);
  expect_gqa<SpecOf<Fp16, 72, 16, true>, ConfigOf<128, 32, false, false, waves>>({}, {30}, 50);
}

TEST_F(ForwardSm90a, PackedHeads) {
  expect_gqa<SpecOf<Bf16, 24, 40, false, BottomRight>, ConfigOf<64, 32, true, true, sections>>(
      {CausalMask{}}, {1, 3, 13, 37, 65}, 50);
}
TEST_F(ForwardSm90a, PackedHeadsInLargerTiles) {
  expect_gqa<SpecOf<Fp16, 72, 16, false, TopLeft>, ConfigOf<128, 48, false, true, sections>>(
      {CausalMask{top_left}}, {5, 40}, 60);
  expect_gqa<SpecOf<Bf16, 16, 24, false>, ConfigOf<192, 32, true, true>>({}, {5, 50}, 40);
}
TEST_F(ForwardSm90a, PackedHeadsOfPackedSequences) {
  expect_gqa<SpecOf<Bf16, 24, 40, true, BottomRight>, ConfigOf<64, 32, true, true, waves>>({CausalMask{}},
                                                                                           {1, 21, 50}, 70);
}
TEST_F(ForwardSm90a, PackedHeadsUnderATree) {
  expect_gqa<SpecOf<Bf16, 24, 40, false, device::Tree>, ConfigOf<64, 32, true, true>>({TreeMask{}}, {1, 30},
                                                                                      70);
}
TEST_F(ForwardSm90a, PackedHeadsWithPadding) {
  expect_gqa<SpecOf<Bf16, 24, 40, false, device::SlidingWindow<Align::bottom_right>, device::Padding>,
             ConfigOf<64, 32, true, true, waves>>({SlidingWindowMask{}, PaddingMask{}}, {1, 37}, 80);
}
TEST_F(ForwardSm90a, PackedHeadsUnderLists) {
  expect_gqa<SpecOf<Bf16, 24, 40, false, device::SlidingWindowWithSinks<Align::bottom_right>,
                    device::BlockSparse<16, 32, false>>,
             ConfigOf<64, 32, true, true, waves>>(
      {SlidingWindowMask{bottom_right, true}, BlockSparseMask{16, 32}}, {1, 45}, 90);
}

TEST_F(ForwardSm90a, HeadsApartWithDropout) {
  expect_gqa<WithDropout<SpecOf<Bf16, 24, 40, false, BottomRight>>, ConfigOf<64, 32, true, false, sections>>(
      {CausalMask{}}, {1, 70}, 70);
  expect_gqa<WithDropout<SpecOf<Fp16, 72, 16, true>>, ConfigOf<128, 48, false, false, waves>>({}, {30}, 100);
}
TEST_F(ForwardSm90a, PackedHeadsWithDropout) {
  expect_gqa<WithDropout<SpecOf<Bf16, 24, 40, false, BottomRight>>, ConfigOf<64, 32, true, true, sections>>(
      {CausalMask{}}, {1, 13}, 70);
  expect_gqa<WithDropout<SpecOf<Fp16, 24, 40, true, device::Tree>>, ConfigOf<128, 48, true, true, waves>>(
      {TreeMask{}}, {20}, 60);
}

TEST_F(ForwardSm90a, FloatOutput) {
  expect_gqa<WithFloatOutput<SpecOf<Bf16, 24, 40, false, BottomRight, device::Padding>>,
             ConfigOf<64, 32, true, false, waves>>({CausalMask{}, PaddingMask{}}, {1, 70}, 50);
  expect_gqa<WithFloatOutput<WithDropout<SpecOf<Fp16, 72, 16, true>>>,
             ConfigOf<128, 32, false, false, waves>>({}, {30}, 50);
  expect_gqa<WithFloatOutput<SpecOf<Bf16, 24, 40, false, BottomRight>>,
             ConfigOf<64, 32, true, true, sections>>({CausalMask{}}, {1, 37}, 30);
}

// A tile may have rows that belong to no query row. Whatever their memory
// held must not change a bit of the other rows, which share a warp with them.
TEST_F(ForwardSm90a, RowsOfNobodyDecideNothing) {
  using Spec = SpecOf<Bf16, 24, 40, false>;
  Workload workload(host,
                    with_spec<Spec>({.heads_q = 5, .heads_kv = 1, .seqlen_q = 23, .seqlen_k = 200}, {}));
  ASSERT_EQ(cuda::packed_heads(5, 23, 64), 5);
  std::vector<std::vector<std::byte>> outputs;
  for (const int garbage : {not_a_number, 0x00, 0x41}) {  // 0x4141 is 12
    workload.reset();
    launch<Spec, ConfigOf<64, 32, true, true>>(workload.given().spec, workload.args(), garbage);
    EXPECT_TRUE(workload.check());
    outputs.push_back(workload.outputs());
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(outputs[0], outputs[2]);
}

TEST(PackedHeads, DivideByMultiplication) {
  for (int heads = 1; heads <= 192; ++heads) {
    device::Sm90aForwardParams p{};
    p.batch = 1;
    p.num_heads_q = heads;
    p.num_heads_kv = 1;
    p.seqlen_q = 1;
    cuda::plan_tiles({.head_dim = 64, .head_dim_v = 64}, {.block_m = 192, .pack_gqa = true}, 132, nullptr, p);
    ASSERT_EQ(p.packed_heads, heads);
    for (device::u32 r = 0; r < 256; ++r)
      ASSERT_EQ(r * p.packed_heads_inverse >> 16, r / static_cast<device::u32>(heads));
  }
}

TEST(PackedHeads, MakeTheFewestTiles) {
  EXPECT_EQ(cuda::packed_heads(1, 1, 128), 1);
  EXPECT_EQ(cuda::packed_heads(8, 1, 64), 8);
  EXPECT_EQ(cuda::packed_heads(4, 64, 128), 2);  // two tiles with 2 as with 4
  EXPECT_EQ(cuda::packed_heads(4, 16, 64), 4);
  EXPECT_EQ(cuda::packed_heads(7, 64, 128), 7);
  EXPECT_EQ(cuda::packed_heads(7, 8192, 128), 1);  // 18 tokens of seven heads leave two rows of a tile empty
  EXPECT_EQ(cuda::packed_heads(71, 1, 64), 1);
  EXPECT_EQ(cuda::packed_heads(71, 1, 128), 71);
  EXPECT_EQ(cuda::packed_heads(128, 1, 64), 64);
  EXPECT_EQ(cuda::packed_heads(4, 1000, 128), 1);  // 32 tiles with any number
  EXPECT_EQ(cuda::packed_heads(4, 520, 128), 2);   // 18 tiles instead of 20; all four heads make 17
  EXPECT_EQ(cuda::packed_heads(4, 4097, 128), 1);  // 132 tiles; packing would make 129
  EXPECT_EQ(cuda::packed_heads(4, 2147483647, 128), 1);
}

}  // namespace
}  // namespace flashjit::testing_support
