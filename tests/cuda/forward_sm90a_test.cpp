// The sm_90a forward without a GPU: parts of keys, wide heads, lists, formulas, pages, 8-bit keys, shards.
#include <cmath>

#include "tests/cuda/forward_sm90a_emulated.hpp"
#include "tools/verify/ds_mla.hpp"

namespace flashjit::testing_support {
namespace {

// Few tiles for many multiprocessors: parts of their keys. Some parts have no keys, some tiles none at all.
TEST_F(ForwardSm90a, PartsOfKeys) {
  const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 300, .seed = 3};
  expect<SpecOf<Bf16, 24, 40, false>, ConfigOf<64, 32, true, false>>(c, {}, 3);
  expect<SpecOf<Bf16, 64, 136, false, BottomRight>, ConfigOf<128, 48, false, true, sections>>(
      c, {CausalMask{}}, 2);
  expect<WithDropout<SpecOf<Fp16, 64, 64, false, TopLeft>>, ConfigOf<128, 64, true, false, sections>>(
      c, {CausalMask{CausalAlign::top_left}}, 5);
  const Case packed{
      .heads_q = 2, .heads_kv = 1, .lengths_q = {30, 1, 0, 90}, .lengths_k = {30, 180, 5, 20}, .seed = 4};
  expect<SpecOf<Fp16, 40, 24, true, BottomRight>, ConfigOf<64, 32, true, true, waves>>(packed, {CausalMask{}},
                                                                                       4);
  Case padded = c;
  padded.batch = 2;
  expect<SpecOf<Bf16, 24, 40, false, device::Padding>, ConfigOf<64, 32, true, false, waves>>(
      padded, {PaddingMask{}}, 8);
  expect<WithFloatOutput<WithFormulaSpec<SpecOf<Bf16, 24, 40, false>, FormulaParams, true>>,
         ConfigOf<64, 32, true, false>>(c, {}, 3);
  Case pages = c;
  pages.page_size = 16;
  pages.layout_kv = MemoryLayout::padded;
  expect<WithKv<WithPages<SpecOf<Bf16, 24, 72, false, BottomRight>>, device::int8, device::KvScale::head>,
         ConfigOf<128, 32, false, true, sections>>(pages, {CausalMask{}}, 4);
  // Lists of blocks, which may have none in a part.
  expect_listed<WithLists<SpecOf<Bf16, 24, 40, false>, FormulaParams, 64, 32>,
                ConfigOf<64, 32, true, false, waves>>(c, 5);
}

// Keys in two pairs of tensors: the first pair ends with a block or within one, has all keys or none; rows
// that see a part of it, in tiles of their own or not; tiles of several heads; parts of keys; pieces that a
// kernel waits for.
TEST_F(ForwardSm90a, GatheredKeys) {
  using Plain = WithGatheredKeys<SpecOf<Bf16, 24, 40, false, BottomRight>>;
  using Packed = WithGatheredKeys<SpecOf<Fp16, 64, 72, false, BottomRight>>;
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 150, .seqlen_k = 290, .seed = 12};
  for (const int gathered : {128, 77, 290, 0})
    expect_gathered<Plain, ConfigOf<64, 32, true, false, sections>>(c, {CausalMask{}}, gathered, 0, 0);
  expect_gathered<Plain, ConfigOf<128, 48, false, false, sections>>(c, {CausalMask{}}, 140, 128, 96);
  expect_gathered<Packed, ConfigOf<64, 32, true, true, sections>>(c, {CausalMask{}}, 140, 75, 140,
                                                                  {1, 2, 3, 4, 5, 6, 7});
  expect_gathered<WithGatheredKeys<SpecOf<Bf16, 24, 264, false>>, DividedConfigOf<32, 2, false>>(c, {}, 99,
                                                                                                 70, 50, {1});
  const Case few{.heads_q = 2, .heads_kv = 1, .seqlen_q = 40, .seqlen_k = 300, .seed = 13};
  expect_gathered<Plain, ConfigOf<64, 32, true, false, sections>>(few, {CausalMask{}}, 200, 20, 90, {1, 1},
                                                                  3);
  // A piece that no row sees is not waited for.
  expect_gathered<Plain, ConfigOf<64, 32, true, false, sections>>(few, {CausalMask{}}, 200, 40, 104, {0, 1});
  expect_gathered<Plain, ConfigOf<64, 32, true, false, sections>>(few, {CausalMask{}}, 200, 40, 99, {0, 1}, 0,
                                                                  true);
}

// Outputs of more than 256 columns: halves alike and not, the second one with more than 256; one block of K
// and V at a time and several; tiles without keys between others, parts, pages, words of dropout.
TEST_F(ForwardSm90a, DividedColumns) {
  const Case c{.batch = 2, .heads_q = 2, .heads_kv = 1, .seqlen_q = 70, .seqlen_k = 150, .seed = 8};
  expect<SpecOf<Bf16, 24, 264, false, BottomRight>, DividedConfigOf<32, 1, false, sections>>(c,
                                                                                             {CausalMask{}});
  expect<WithDropout<SpecOf<Fp16, 264, 328, false>>, DividedConfigOf<48, 2, true>>(c, {});
  expect<WithFloatOutput<SpecOf<Bf16, 16, 520, false>>, DividedConfigOf<64, 1, false>>(c, {});
  expect<SpecOf<Fp16, 8, 576, false>, DividedConfigOf<16, 3, true>>(c, {}, 3);
  const Case packed{.heads_q = 2, .heads_kv = 1, .lengths_q = {30, 1, 0, 90}, .lengths_k = {30, 0, 5, 20}};
  expect<SpecOf<Bf16, 40, 264, true, BottomRight>, DividedConfigOf<32, 1, true, waves>>(packed,
                                                                                        {CausalMask{}});
  expect<SpecOf<Bf16, 24, 320, false, device::Padding>, DividedConfigOf<32, 2, false, waves>>(
      c, {PaddingMask{}});
  // One text for both halves.
  expect<SpecOf<Bf16, 24, 384, false, BottomRight>, DividedConfigOf<32, 2, false, sections>>(c,
                                                                                             {CausalMask{}});
  expect<SpecOf<Bf16, 24, 384, false, BottomRight>, DividedConfigOf<32, 2, false, sections>>(
      c, {CausalMask{}}, 3);
  expect<WithFloatOutput<SpecOf<Fp16, 40, 512, true, BottomRight>>, DividedConfigOf<16, 1, true, waves>>(
      packed, {CausalMask{}});
  Case pages = c;
  pages.page_size = 16;
  pages.layout_kv = MemoryLayout::padded;
  expect<WithPages<SpecOf<Bf16, 24, 264, false, BottomRight>>, DividedConfigOf<32, 1, true, sections>>(
      pages, {CausalMask{}});
  expect<WithFormulaSpec<WithPages<SpecOf<Bf16, 24, 512, false>>, FormulaParams, false>,
         DividedConfigOf<32, 1, false>>(pages, {});
  expect_listed<WithLists<SpecOf<Bf16, 24, 264, false>, FormulaParams, 64, 32>,
                DividedConfigOf<32, 1, false, waves>>(c);
}

// Values that are the first columns of keys: with one warpgroup for all columns and with two, several tiles
// of rows, parts, pages, sequences that end within a block.
TEST_F(ForwardSm90a, ValuesInKeys) {
  const Case c{.batch = 2, .heads_q = 6, .heads_kv = 1, .seqlen_q = 30, .seqlen_k = 150, .seed = 5};
  expect<ValuesInKeys<SpecOf<Bf16, 40, 24, false, BottomRight>>, ConfigOf<128, 32, true, true, sections>>(
      c, {CausalMask{}});
  using Latent = ValuesInKeys<SpecOf<Fp16, 328, 264, false>>;
  expect<Latent, DividedConfigOf<32, 2, true>>(c, {});
  expect<Latent, DividedConfigOf<16, 3, false>>(c, {}, 3);
  expect<ValuesInKeys<SpecOf<Fp16, 272, 264, false>>, WithQInRegisters<DividedConfigOf<32, 2, true>>>(c, {});
  Case pages = c;
  pages.page_size = 16;
  expect<WithPages<ValuesInKeys<SpecOf<Bf16, 576, 512, false, BottomRight>>>,
         DividedConfigOf<32, 2, true, waves>>(pages, {CausalMask{}}, 2, 20);
  const Case packed{.heads_q = 2, .heads_kv = 1, .lengths_q = {30, 0, 9}, .lengths_k = {35, 5, 70}};
  expect<WithDropout<ValuesInKeys<SpecOf<Bf16, 264, 264, true, BottomRight>>>,
         DividedConfigOf<32, 2, false, waves>>(packed, {CausalMask{}});
}

// Consumers that alternate: odd and even numbers of blocks, which begin in either stage, and tiles without
// keys between; sequences that end within a block of pages that hold NaN, parts, padding.
TEST_F(ForwardSm90a, AlternatingConsumers) {
  Case c{.batch = 2, .heads_q = 6, .heads_kv = 1, .seqlen_q = 30, .seqlen_k = 400, .seed = 6};
  expect<ValuesInKeys<SpecOf<Fp16, 328, 264, false>>, AlternatingConfigOf<true>>(c, {});
  expect<ValuesInKeys<SpecOf<Bf16, 264, 264, false, BottomRight>>, AlternatingConfigOf<false>>(
      c, {CausalMask{}}, 3);
  expect<ValuesInKeys<SpecOf<Bf16, 448, 384, false, device::Padding>>,
         AlternatingConfigOf<true, device::TileOrder::waves>>(c, {PaddingMask{}});
  const Case packed{.heads_q = 2, .heads_kv = 1, .lengths_q = {30, 0, 9, 70}, .lengths_k = {35, 5, 170, 0}};
  expect<ValuesInKeys<SpecOf<Bf16, 264, 264, true, BottomRight>>,
         AlternatingConfigOf<false, device::TileOrder::waves>>(packed, {CausalMask{}});
  c.page_size = 16;
  c.lengths_k = {400, 90};
  expect<WithPages<ValuesInKeys<SpecOf<Bf16, 576, 512, false, BottomRight>>>,
         AlternatingConfigOf<true, device::TileOrder::waves>>(c, {CausalMask{}}, 2, 20);
}

// Values in keys of 8 bits, which become one tile: blocks of one, two and three pieces of rows, head dims
// that end within a piece of columns, windows, pages of one key.
TEST_F(ForwardSm90a, ValuesIn8BitKeys) {
  using device::fp8_e4m3;
  using device::fp8_e5m2;
  using device::int8;
  using enum device::KvScale;
  Case c{
      .batch = 2, .heads_q = 6, .heads_kv = 1, .seqlen_q = 15, .seqlen_k = 150, .page_size = 16, .seed = 8};
  c.lengths_k = {150, 35};
  using Latent = WithPages<ValuesInKeys<SpecOf<Bf16, 576, 512, false, BottomRight>>>;
  expect<WithKv<Latent, fp8_e4m3, tensor>, DividedConfigOf<32, 3, true, waves>>(c, {CausalMask{}});
  expect<WithKv<Latent, int8, tensor>, ConvertingConfigOf<DividedConfigOf<32, 3, true, waves>>>(
      c, {CausalMask{}});
  using Odd = WithPages<ValuesInKeys<SpecOf<Fp16, 336, 272, false>>>;
  c.page_size = 1;
  expect<WithKv<Odd, int8, head>, DividedConfigOf<48, 2, true>>(c, {}, 3);
  c.page_size = 64;
  c.layout_kv = MemoryLayout::padded;
  using Window =
      WithPages<ValuesInKeys<SpecOf<Bf16, 272, 272, false, device::SlidingWindow<Align::bottom_right>>>>;
  expect<WithKv<Window, fp8_e5m2, tensor>, DividedConfigOf<16, 3, false, waves>>(c, {SlidingWindowMask{}});
}

// Keys whose 512 columns have four scales. These are powers of two here: no column is rounded.
TEST_F(ForwardSm90a, KeysOfDsMla) {
  using Spec = WithKv<WithPages<ValuesInKeys<SpecOf<Bf16, 576, 512, false, BottomRight>>>, device::fp8_ds_mla,
                      device::KvScale::tensor>;
  for (const int page_size : {16, 8}) {
    if (!has_turn()) continue;
    Case c{.batch = 2,
           .heads_q = 6,
           .heads_kv = 1,
           .seqlen_q = 15,
           .seqlen_k = 150,
           .page_size = page_size,
           .seed = 9};
    c.lengths_k = {150, 35};
    Workload workload(host, with_spec<Spec>(c, {CausalMask{}}));
    const Tensor scales = verify::DsMlaParts(workload.k().on_host()).scales;
    for (std::int64_t page = 0; page < scales.shape[0]; ++page)
      for (std::int64_t row = 0; row < scales.shape[1]; ++row)
        for (std::int64_t group = 0; group < scales.shape[3]; ++group) {
          float& scale =
              static_cast<float*>(scales.data)[page * scales.strides[0] + row * scales.strides[1] + group];
          if (std::isfinite(scale))
            scale = std::copysign(std::exp2(std::rint(std::log2(std::abs(scale)))), scale);
        }
    workload.k().upload();
    workload.reset();
    AttentionSpec forward = workload.given().spec;
    forward.op = Operation::forward;
    if (page_size == 8)
      launch<Spec, DividedConfigOf<32, 3, true, waves>>(forward, workload.args(), not_a_number);
    else
      launch<Spec, ConvertingConfigOf<DividedConfigOf<32, 3, true, waves>>>(forward, workload.args(),
                                                                            not_a_number);
    EXPECT_TRUE(workload.check());
  }
}

// A long sequence among short ones and one without keys: most parts are the long one's. More entries than a
// warp has lanes; several tiles of an entry; lengths of a padding mask.
TEST_F(ForwardSm90a, PartsByLength) {
  using Latent = WithPages<ValuesInKeys<SpecOf<Bf16, 264, 264, false>>>;
  Case c{.batch = 4, .heads_q = 4, .heads_kv = 1, .seqlen_q = 2, .seqlen_k = 900, .page_size = 16, .seed = 6};
  c.lengths_k = {20, 900, 0, 35};
  expect<Latent, DividedConfigOf<16, 2, true>>(c, {}, 30, 20);
  c.seqlen_q = 70, c.heads_q = 2;
  expect<Latent, DividedConfigOf<16, 2, false>>(c, {}, 9, 40);
  c.batch = 40, c.seqlen_q = 1;
  c.lengths_k.assign(40, 17);
  c.lengths_k[33] = 500;
  expect<Latent, DividedConfigOf<16, 2, true>>(c, {}, 31, 83);
  Case padded{.batch = 3, .heads_q = 2, .heads_kv = 1, .seqlen_q = 30, .seqlen_k = 300, .seed = 7};
  expect<SpecOf<Fp16, 16, 264, false, device::Padding>, DividedConfigOf<16, 1, false, waves>>(
      padded, {PaddingMask{}}, 8, 20);
}

// Shares that have the end of an entry, whole entries and the beginning of another one: more entries than
// shares; rows of several lengths; keys before a window, which cost nothing; masks that the producer looks
// up.
TEST_F(ForwardSm90a, SharesOfManySequences) {
  using Latent = ValuesInKeys<SpecOf<Bf16, 264, 264, false>>;
  Case c{.batch = 40, .heads_q = 4, .heads_kv = 1, .seqlen_k = 333, .page_size = 16, .seed = 8};
  for (int i = 0; i < c.batch; ++i) c.lengths_k.push_back(i * i * 37 % 61);
  c.lengths_k[5] = 333;
  expect<WithPages<Latent>, DividedConfigOf<16, 2, true>>(c, {}, 21, 12);
  using Packed = ValuesInKeys<SpecOf<Fp16, 264, 264, true, BottomRight>>;
  const Case packed{.heads_q = 2,
                    .heads_kv = 1,
                    .seqlen_k = 200,
                    .lengths_q = {3, 0, 1, 40, 2},
                    .lengths_k = {50, 7, 0, 140, 200},
                    .page_size = 16,
                    .seed = 9};
  expect<WithPages<Packed>, DividedConfigOf<16, 2, true, waves>>(packed, {CausalMask{}}, 13, 40);
  const Case window{.batch = 3,
                    .heads_q = 2,
                    .heads_kv = 1,
                    .seqlen_q = 3,
                    .seqlen_k = 700,
                    .lengths_k = {700, 90, 0},
                    .page_size = 16,
                    .seed = 10};
  using Window = ValuesInKeys<SpecOf<Bf16, 264, 264, false, device::SlidingWindow<Align::bottom_right>>>;
  expect<WithPages<Window>, DividedConfigOf<16, 2, true>>(window, {SlidingWindowMask{}}, 4, 20);
  using Tree = ValuesInKeys<SpecOf<Bf16, 264, 264, false, device::Tree>>;
  expect<WithPages<Tree>, DividedConfigOf<16, 2, true, waves>>(window, {TreeMask{}}, 9, 20);
}

// Every block of keys is one share's, shares differ by little, and the merge is told of each entry that
// several have.
TEST(Sm90aShares, DivideAllKeysEqually) {
  using Spec = WithPages<SpecOf<Bf16, 264, 264, false>>;
  using Lengths =
      device::Sm90aLengths<device::ForwardSm90a<Spec, Emulated<Spec, DividedConfigOf<16, 2, true>>>>;
  constexpr int heads = 3, tokens = 16;  // of a tile
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    std::vector<int> lengths(1 + verify::random_bits(seed, 0) % 70);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      const std::uint64_t bits = verify::random_bits(seed, i + 1);
      lengths[i] = static_cast<int>(bits % 8 == 0 ? 0 : bits % 8 == 1 ? bits / 8 % 100000 : bits / 8 % 700);
    }
    const int tiles = 1 + static_cast<int>(seed % 2);
    device::Paged<device::Sm90aForwardParams> p{};
    p.batch = static_cast<int>(lengths.size());
    p.num_heads_kv = tiles;
    p.num_heads_q = heads * tiles;
    p.packed_heads = heads;
    p.packed_heads_inverse = (1 << 16) / heads + 1;
    p.seqlen_q = tokens;
    p.seqlen_k = 100000;
    p.seqlens_k = lengths.data();
    p.parts = 2;
    p.part_blocks = 1 + static_cast<int>(seed % 5);
    p.shares = 1 + static_cast<int>(seed * 7 % 128);
    std::vector<int> begun(static_cast<std::size_t>(2 * p.shares), -7);
    p.begun = begun.data();
    std::vector<device::Sm90aShare> shares(static_cast<std::size_t>(p.shares * tiles));
    run_grid(Grid{static_cast<unsigned>(shares.size())}, 32, 16, [&] {
      const int lane = static_cast<int>(threadIdx.x);
      Lengths::divide(p, 0, lane);
      if (lane == 0) std::memcpy(&shares[blockIdx.x], device::dynamic_shared, sizeof shares[0]);
    });

    const auto blocks_of = [&](int batch) { return (lengths[static_cast<std::size_t>(batch)] + 15) / 16; };
    int batch = 0, block = 0;  // the next share's first
    int most = 0, least = std::numeric_limits<int>::max(), parts = 0, begins = -1;
    for (int i = 0; i < p.shares; ++i) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", share " + std::to_string(i));
      const device::Sm90aShare& share = shares[static_cast<std::size_t>(i * tiles)];
      EXPECT_EQ(std::memcmp(&share, &shares[static_cast<std::size_t>(i * tiles + tiles - 1)], sizeof share),
                0);
      const int* const told = &begun[static_cast<std::size_t>(2 * i)];
      if (!share.has(share.batch)) {
        EXPECT_EQ(told[0], -1);
        continue;
      }
      ASSERT_EQ(share.batch, batch);
      ASSERT_EQ(share.block, block);
      int cost = 0;
      for (; share.has(batch); block = 0, ++batch) {
        const device::Span keys = share.keys(batch, 16);
        ASSERT_EQ(keys.begin, 16 * block);
        cost += std::min(keys.end / 16, blocks_of(batch)) - block + (block == 0 ? Lengths::tile_cost : 0);
        ++parts;
        if (share.ends(batch)) {
          if (block > 0) {
            EXPECT_EQ(begun[static_cast<std::size_t>(2 * begins + 1)], parts);
          }
          continue;
        }
        EXPECT_EQ(told[0], block == 0 ? batch : -1);
        if (block == 0) {
          parts = 1;
          begins = i;
        }
        block = share.end_block;
        ASSERT_LT(block, blocks_of(batch));
        break;
      }
      if (block == 0) {
        EXPECT_EQ(told[0], -1);
      }
      most = std::max(most, cost);
      least = std::min(least, cost);
    }
    EXPECT_EQ(batch, p.batch);
    EXPECT_EQ(block, 0);
    EXPECT_LE(most - least, 1 + 2 * Lengths::tile_cost) << "seed " << seed;
  }
}

// Parts whose keys are all far from 0, so that some have sums of 0 and references beyond float32.
TEST_F(ForwardSm90a, PartsOfFarScores) {
  using Spec = SpecOf<Bf16, 24, 40, false, BottomRight>;
  for (const double sign : {1.0, -1.0})
    for (const double scale : {0x1p-4, 0x1p4, 0x1p11, 0x1p120}) {
      Case c = with_spec<Spec>(
          {.heads_q = 2, .heads_kv = 1, .seqlen_q = 3, .seqlen_k = 330, .data = Data::plain}, {CausalMask{}});
      c.softmax_scale = static_cast<float>(scale);
      SCOPED_TRACE(c.str() + " sign " + std::to_string(sign));
      Workload workload(host, c);
      SharedMaxima maxima(workload, true);
      maxima.set_scores(sign);
      workload.reset();
      launch<Spec, ConfigOf<64, 32, true, false>>(c.spec, workload.args(), not_a_number, 4);
      maxima.expect(scale);
    }
}

// Three consumers of narrow heads take a block's maxima only where weights leave their range: in the first
// block of a row, in some of the later ones, or in none.
TEST_F(ForwardSm90a, WeightsThatLeaveTheirRange) {
  for (const Data data : {Data::plain, Data::huge_scores, Data::falling}) {
    Case c{.batch = 1, .heads_q = 2, .heads_kv = 1, .seqlen_q = 200, .seqlen_k = 230, .data = data};
    for (const float scale : {0.3f, 4.0f}) {
      c.softmax_scale = scale;
      expect<SpecOf<Bf16, 24, 40, false>, ConfigOf<192, 32, false, false>>(c, {});
      expect<SpecOf<Fp16, 64, 64, false, BottomRight>, ConfigOf<192, 64, false, false, sections>>(
          c, {CausalMask{}});
    }
    c.seqlen_k = 90;  // the first rows see nothing
    expect<SpecOf<Fp16, 24, 40, false, BottomRight>, ConfigOf<192, 32, false, true, sections>>(
        c, {CausalMask{}});
    c.lengths_q = {150, 20}, c.lengths_k = {70, 90};
    expect<WithDropout<SpecOf<Bf16, 24, 40, true>>, ConfigOf<192, 32, false, false, waves>>(c, {});
  }
}

// The first rows of a tile see nothing of its first block, or a part of it; or of no block.
TEST_F(ForwardSm90a, BlocksThatFirstRowsDoNotSee) {
  using Narrow = SpecOf<Bf16, 24, 40, false, BottomRight>;
  for (const int keys : {290, 333, 100}) {
    const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 290, .seqlen_k = keys, .seed = 5};
    expect<Narrow, ConfigOf<128, 64, true, false, sections>>(c, {CausalMask{}}, 2);
    expect<Narrow, ConfigOf<192, 128, false, false, sections>>(c, {CausalMask{}});
    expect<SpecOf<Fp16, 72, 64, false, Window>, ConfigOf<192, 80, false, false, sections>>(
        c, {SlidingWindowMask{}});
  }
  const Case packed{
      .heads_q = 2, .heads_kv = 1, .lengths_q = {200, 1, 0, 150}, .lengths_k = {200, 80, 5, 60}, .seed = 6};
  expect<WithDropout<SpecOf<Fp16, 72, 64, true, BottomRight>>, ConfigOf<192, 64, false, false, waves>>(
      packed, {CausalMask{}});
}

// Tiles within blocks, blocks within tiles, and tiles across the edges of blocks.
TEST_F(ForwardSm90a, ListsOfItsMasks) {
  const Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 150, .seqlen_k = 200};
  using Spec = SpecOf<Bf16, 24, 40, false>;
  expect_listed<WithLists<Spec, FormulaParams, 64, 32>, ConfigOf<64, 32, true, false, waves>>(c);
  expect_listed<WithLists<Spec, FormulaParams, 16, 16>, ConfigOf<128, 48, false, true, waves>>(c);
  expect_listed<WithLists<Spec, FormulaParams, 48, 80>, ConfigOf<64, 64, true, false, waves>>(c);
}

TEST_F(ForwardSm90a, Formulas) {
  Case c{.batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = 70, .seqlen_k = 150};
  using Spec = SpecOf<Bf16, 24, 40, false>;
  expect<WithFormulaSpec<Spec, FormulaParams, true>, ConfigOf<64, 32, true, false>>(c, {});
  expect<WithFormulaSpec<Spec, FormulaParams, false>, ConfigOf<128, 48, true, true>>(c, {});
  c.seqlen_q = 90, c.seqlen_k = 40;  // the first rows see nothing
  c.page_size = 16;
  expect<WithFormulaSpec<WithPages<Spec>, FormulaParams, false>, ConfigOf<64, 32, false, true>>(c, {});
  c.page_size = 0;
  c.lengths_q = {3, 0, 40}, c.lengths_k = {50, 7, 20};
  expect<WithFormulaSpec<WithDropout<SpecOf<Fp16, 72, 16, true>>, FormulaParams, false>,
         ConfigOf<128, 32, false, false, waves>>(c, {});
}

// Blocks of keys that are far below a row's other ones.
TEST_F(ForwardSm90a, FarKeys) {
  const Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 5, .seqlen_k = 1200};
  using Spec = SpecOf<Fp16, 16, 16, false>;
  expect<WithFarKeys<Spec, FormulaParams, false>, ConfigOf<64, 128, true, false>>(c, {});
  expect<WithFarKeys<Spec, FormulaParams, true>, ConfigOf<64, 128, false, false>>(c, {});
}

// Blocks on both sides of the rows' own keys, across them, and rows before the first key.
TEST_F(ForwardSm90a, FormulasLinearInTheKey) {
  using Spec = SpecOf<Bf16, 24, 40, false>;
  for (const int seqlen_q : {70, 250}) {
    const Case c{.batch = 1, .heads_q = 4, .heads_kv = 2, .seqlen_q = seqlen_q, .seqlen_k = 150};
    expect<WithTilt<Spec, FormulaParams, true>, ConfigOf<64, 32, true, false>>(c, {});
    expect<WithTilt<SpecOf<Fp16, 24, 40, false, BottomRight>, FormulaParams, false>,
           ConfigOf<128, 48, true, true, sections>>(c, {CausalMask{}});
  }
}

// Scores near 0 in all blocks, in some, and in none; caps whose exponents leave the range of weights.
TEST_F(ForwardSm90a, Caps) {
  using Spec = SpecOf<Bf16, 24, 40, false>;
  for (const Data data : {Data::plain, Data::huge_scores, Data::rising, Data::falling})
    for (const double cap : {2.5, 50.0, 1000.0}) {
      const Case c{.batch = 1,
                   .heads_q = 2,
                   .heads_kv = 1,
                   .seqlen_q = 70,
                   .seqlen_k = 150,
                   .data = data,
                   .named = {{}, {{"cap", cap}}}};
      expect<WithCap<Spec, FormulaParams, false>, ConfigOf<64, 32, false, false>>(c, {});
      expect<WithCap<SpecOf<Fp16, 24, 40, false, BottomRight>, FormulaParams, true>,
             ConfigOf<128, 48, false, true, sections>>(c, {CausalMask{}});
    }
}

// Blocks near 0 whose weights leave fp16's range: 8-bit values are multiplied as fp16.
TEST_F(ForwardSm90a, CapsBesideEightBitValues) {
  using enum device::KvScale;
  using Spec = WithCap<WithPages<SpecOf<Bf16, 24, 40, false>>, QuantisedFormulaParams, true>;
  for (const float scale : {0.5f, 1.0f, 2.0f}) {
    const Case c{.heads_q = 2,
                 .heads_kv = 1,
                 .seqlen_q = 50,
                 .seqlen_k = 90,
                 .page_size = 16,
                 .layout_kv = MemoryLayout::padded,
                 .data = Data::plain,
                 .softmax_scale = scale,
                 .named = {{}, {{"cap", 100}}}};
    expect<WithKv<Spec, device::int8, tensor>, ConfigOf<64, 32, true, false>>(c, {});
    expect<WithKv<Spec, device::fp8_e4m3, head>, ConfigOf<64, 32, true, true>>(c, {});
    expect<WithKv<Spec, device::int8, token_head>, ConfigOf<64, 32, true, false>>(c, {});
  }
}

// A row's masked blocks come first. Their scores are so far below those of its other blocks, which are near
// 0, that weights relative to them leave the range.
TEST_F(ForwardSm90a, CapsAfterLowScores) {
  const auto expect_right = [&]<class Spec>(Spec, float low, float high) {
    const Case c{.batch = 1,
                 .heads_q = 2,
                 .heads_kv = 1,
                 .seqlen_q = 70,
                 .seqlen_k = 150,
                 .softmax_scale = 1.0f,
                 .named = {{}, {{"cap", 100}}}};
    Workload workload(host, with_spec<Spec>(c, {CausalMask{}}));
    const auto fill = [](GuardedTensor& tensor, auto&& score) {
      const Tensor t = tensor.on_host();
      for (std::int64_t row = 0; row < t.shape[1]; ++row)
        for (std::int64_t head = 0; head < t.shape[2]; ++head)
          for (std::int64_t i = 0; i < t.shape[3]; ++i)
            verify::store_element(t.data, t.dtype, row * t.strides[1] + head * t.strides[2] + i,
                                  i == 0 ? score(row) : 0);
      tensor.upload();
    };
    fill(workload.q(), [](std::int64_t) { return 1.0f; });
    fill(workload.k(), [&](std::int64_t key) { return key < 64 ? high : low; });
    workload.reset();
    launch<Spec, ConfigOf<64, 32, true, false, sections>>(workload.given().spec, workload.args(),
                                                          not_a_number);
    EXPECT_TRUE(workload.check());
  };
  expect_right(WithCap<SpecOf<Fp16, 24, 40, false, BottomRight>, FormulaParams, false>{}, -5, 8);
  expect_right(WithCap<SpecOf<Bf16, 24, 40, false, BottomRight>, FormulaParams, false>{}, -90, 30);
  expect_right(WithCap<SpecOf<Bf16, 24, 40, false, BottomRight>, FormulaParams, true>{}, 90, -30);
}

// Boxes of whole blocks, of parts of them, of single keys; lengths that end within a page; pages before a
// window, and stale slots with NaN.
TEST_F(ForwardSm90a, Pages) {
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
    expect<WithPages<SpecOf<Bf16, 24, 72, false, BottomRight>>, ConfigOf<64, 96, true, false, sections>>(
        c, {CausalMask{}});
    expect<WithPages<SpecOf<Fp16, 72, 16, false, device::SlidingWindow<Align::bottom_right>>>,
           ConfigOf<128, 32, false, false>>(c, {SlidingWindowMask{}});
  }
}
TEST_F(ForwardSm90a, PagesOfPackedRowsAndHeads) {
  std::uint64_t seed = 50;
  for (const int page_size : {1, 16, 64}) {
    const Case c{.heads_q = 6,
                 .heads_kv = 2,
                 .seqlen_k = 150,
                 .lengths_q = {1, 0, 33, 64},
                 .lengths_k = {150, 20, 33, 100},
                 .page_size = page_size,
                 .spare_rows = 7,
                 .seed = ++seed};
    expect<WithPages<SpecOf<Bf16, 24, 40, true, BottomRight>>, ConfigOf<64, 32, true, true, waves>>(
        c, {CausalMask{}});
    expect<WithPages<WithDropout<SpecOf<Bf16, 24, 40, true, device::Tree>>>,
           ConfigOf<64, 48, true, true, waves>>(c, {TreeMask{}});
  }
}
// Each dtype and sharing of scales, beside look-ups, packed rows and heads, tiles without keys and of one
// block.
TEST_F(ForwardSm90a, EightBitKeysAndValues) {
  using enum device::KvScale;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  Case c{.batch = 3,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 70,
         .seqlen_k = 260,
         .lengths_k = {260, 0, 33},
         .page_size = 16,
         .layout_kv = MemoryLayout::padded,
         .seed = 90};
  using Causal = WithPages<SpecOf<Bf16, 24, 72, false, BottomRight>>;
  expect<WithKv<Causal, fp8_e4m3, token_head>, ConfigOf<64, 96, true, false, sections>>(c, {CausalMask{}});
  expect<WithKv<Causal, int8, head>, ConfigOf<128, 32, false, true, sections>>(c, {CausalMask{}});
  c.page_size = 1;
  expect<WithKv<Causal, int8, tensor>, ConfigOf<64, 48, false, true, waves>>(c, {CausalMask{}});
  c.page_size = 48;
  using Sinks = WithPages<SpecOf<Fp16, 40, 24, false, device::SlidingWindowWithSinks<Align::bottom_right>>>;
  expect<WithKv<Sinks, fp8_e5m2, token_head>, ConfigOf<64, 32, true, true>>(
      c, {SlidingWindowMask{bottom_right, true}});
  using Wide = WithPages<SpecOf<Bf16, 128, 136, false, device::Padding, device::BlockSparse<16, 32, false>>>;
  expect<WithKv<Wide, fp8_e5m2, head>, ConfigOf<64, 32, false, true, waves>>(
      c, {PaddingMask{}, BlockSparseMask{16, 32}});
  c.lengths_q = {1, 0, 64};
  using Tree = WithPages<SpecOf<Bf16, 128, 64, true, device::Tree>>;
  expect<WithKv<Tree, int8, token_head>, ConfigOf<64, 48, false, true, waves>>(c, {TreeMask{}});
}
TEST_F(ForwardSm90a, PagesUnderSinksListsAndPadding) {
  std::uint64_t seed = 80;
  for (const int page_size : {2, 16, 80})
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Case c{.batch = 2,
                   .heads_q = 2,
                   .seqlen_q = 40,
                   .seqlen_k = 300,
                   .page_size = page_size,
                   .poison = repeat % 2 ? Poison::infinity : Poison::nan,
                   .seed = ++seed};
      expect<WithPages<SpecOf<Bf16, 24, 40, false, device::SlidingWindowWithSinks<Align::bottom_right>>>,
             ConfigOf<64, 96, true, true>>(c, {SlidingWindowMask{bottom_right, true}});
      expect<WithPages<SpecOf<Fp16, 24, 40, false, device::Padding, device::BlockSparse<16, 32, false>>>,
             ConfigOf<64, 32, true, true, waves>>(c, {PaddingMask{}, BlockSparseMask{16, 32}});
    }
}

// Blocks of the fewest keys, which the widest heads take beside many features.
TEST_F(ForwardSm90a, NarrowBlocks) {
  const Case c{.heads_q = 2,
               .heads_kv = 1,
               .seqlen_k = 90,
               .lengths_q = {70, 0, 5},
               .lengths_k = {90, 40, 5},
               .page_size = 16,
               .seed = 91};
  using Tree = WithPages<SpecOf<Fp16, 72, 256, true, device::Tree>>;
  expect<WithFormulaSpec<WithDropout<Tree>, FormulaParams, false>, ConfigOf<64, 16, false, false, waves>>(
      c, {TreeMask{}});
  expect<
      WithKv<WithPages<SpecOf<Bf16, 48, 256, true, BottomRight>>, device::int8, device::KvScale::token_head>,
      ConfigOf<64, 32, true, false, waves>>(c, {CausalMask{}});
}

TEST_F(ForwardSm90a, Shards) {
  using Params = device::Paged<device::Sm90aForwardParams>;
  using Base = SpecOf<Bf16, 24, 40, false>;
  using device::TileOrder;
  Case c{.batch = 2, .heads_q = 4, .heads_kv = 2, .seqlen_q = 90, .seqlen_k = 250};
  c.seed = 600 + sample_seed() % 50;
  using Causal = WithShard<WithDropout<Base>, Params, device::Causal<Align::top_left>>;
  expect<Causal, ConfigOf<64, 32, true, true, TileOrder::sections>>(c, {CausalMask{}});
  expect<Causal, ConfigOf<64, 32, true, false, TileOrder::sections>>(c, {CausalMask{}}, 3);
  expect<WithShard<Base, Params, device::BlockSparse<64, 64, true>>,
         ConfigOf<64, 64, true, false, TileOrder::waves>>(c, {BlockSparseMask{64, 64, true}});
  expect<WithShard<Base, Params, device::SlidingWindow<Align::top_left>>,
         ConfigOf<64, 48, false, true, TileOrder::heads>>(c, {SlidingWindowMask{}});
}

}  // namespace
}  // namespace flashjit::testing_support
