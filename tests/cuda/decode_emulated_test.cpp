// The GPU decode's own code on the host (decode_on_gpu.hpp): the division of work, pages, heads and positions
// of a tile, parts and their merge. And the division of work alone, for many lengths.
#include "tests/cuda/decode_on_gpu.hpp"

#include "shared/tree.h"
#include "tests/support/far_scales.hpp"
#include "tests/support/far_scores.hpp"
#include "tests/support/positions.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::testing_support {
namespace {

// Numbers of query heads for each key/value head: one, powers of two, divisors of no tile, more than a tile
// has rows. One launch has parts of tiles, whole tiles and several tiles of one block.
TEST_F(DecodeOnGpu, GroupsAndNewTokens) {
  std::uint64_t seed = 0;
  for (const auto& [heads_per_kv_head, heads_kv] :
       {std::pair{1, 3}, {2, 2}, {3, 2}, {4, 2}, {7, 1}, {16, 1}, {37, 1}})
    for (const int rows : {1, 9}) {
      const Case c{.batch = 2,
                   .heads_q = heads_per_kv_head * heads_kv,
                   .heads_kv = heads_kv,
                   .seqlen_q = rows,
                   .seqlen_k = 300,
                   .layout = static_cast<MemoryLayout>(seed % 5),
                   .layout_kv = static_cast<MemoryLayout>(seed / 2 % 5),
                   .seed = ++seed};
      if (seed % 2)
        expect<SpecOf<Bf16, 24, 40, false, false, BottomRight>, ConfigOf<16, 16, 2, 4>>(c, {CausalMask{}});
      else
        expect<SpecOf<Fp16, 72, 16, true, false, BottomRight>, ConfigOf<16, 32, 1, 8>>(c, {CausalMask{}});
    }
}

// A row whose scores are NaN is NaN, though no part of it has a largest score.
TEST_F(DecodeOnGpu, NotANumberInEveryPart) {
  using Spec = SpecOf<Bf16, 16, 16, false, false, BottomRight>;
  const auto expect_nan = [&]<class Of>(Of) {
    Workload workload(
        host,
        with_spec<Of>({.heads_q = 2, .heads_kv = 1, .seqlen_k = 1600, .data = Data::plain}, {CausalMask{}}));
    const Tensor q = workload.q().on_host();
    verify::store_element(q.data, q.dtype, q.strides[2], NAN);  // query head 1
    workload.q().upload();
    workload.reset();
    launch<Of, ConfigOf<16, 32, 1, 8>>(workload.given(), workload.args(), 5);
    EXPECT_EQ(steps, 2u);
    ASSERT_TRUE(workload.fetch());
    const Tensor o = *workload.host_args().o, lse = *workload.host_args().lse;
    for (int head = 0; head < 2; ++head) {
      EXPECT_EQ(std::isnan(verify::load_element(lse.data, lse.dtype, head * lse.strides[1])), head == 1);
      for (int c = 0; c < 16; ++c)
        EXPECT_EQ(std::isnan(verify::load_element(o.data, o.dtype, head * o.strides[2] + c)), head == 1);
    }
  };
  expect_nan(Spec{});
  expect_nan(Invariant<Spec>{});
}

using FormulaParams = device::WithFormulas<device::CudaDecodeParams>;

TEST_F(DecodeOnGpu, Formulas) {
  using Spec = SpecOf<Bf16, 24, 40, false, false>;
  using Paged = SpecOf<Fp16, 72, 16, true, false>;
  std::uint64_t seed = 0;
  for (const auto& [rows, keys] : {std::pair{1, 300}, {9, 4}}) {
    const Case c{.batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = rows, .seqlen_k = keys, .seed = ++seed};
    expect<WithFormulaSpec<Spec, FormulaParams, true>, ConfigOf<16, 16, 2, 4>>(c, {});
    expect<Invariant<WithFormulaSpec<Paged, FormulaParams, false>>, ConfigOf<16, 32, 1, 4>>(c, {});
    expect<WithFormulaSpec<Paged, FormulaParams, true>, ConfigOf<32, 32, 1, 8>>(c, {});
  }
}

// Parts keep a row's largest score and its sum apart. In float32 one number has no room for both here.
TEST_F(DecodeOnGpu, Shards) {
  using Spec = SpecOf<Bf16, 24, 40, false, false>;
  using Paged = SpecOf<Fp16, 72, 16, true, true>;
  using Params = device::CudaDecodeParams;
  const int rows = sample_seed() % 2 ? 1 : 9;
  Case c{.batch = 3, .heads_q = 3, .heads_kv = 1, .seqlen_q = rows, .seqlen_k = 150};
  c.seed = 400 + sample_seed() % 50;
  expect<WithShard<Spec, Params, device::Causal<Align::top_left>>, ConfigOf<16, 16, 2, 4>>(c, {CausalMask{}});
  expect<WithShard<Spec, Params, device::SlidingWindowWithSinks<Align::top_left>>, ConfigOf<16, 16, 2, 4>>(
      c, {SlidingWindowMask{.sinks = true}});
  c.lengths_q.assign(3, rows);
  c.lengths_k = {150, 0, 40};
  expect<WithShard<Paged, Params, device::Tree>, ConfigOf<16, 16, 2, 4>>(c, {TreeMask{}});
}

TEST_F(DecodeOnGpu, SumsOfFarScores) {
  const auto expect_far = [&]<class Spec, class Config>(Spec, Config, int multiprocessors) {
    for (const double scale : {0x1p0, 0x1p4, 0x1p11}) {
      if (!has_turn()) continue;
      Case c{.heads_q = 2, .heads_kv = 1, .seqlen_q = 2, .seqlen_k = 1200, .lengths_k = {1200}};
      c.data = Data::plain;
      c.softmax_scale = static_cast<float>(scale);
      SCOPED_TRACE(scale);
      Workload workload(host, with_spec<Spec>(c, {CausalMask{}}));
      SharedMaxima maxima(workload, true);
      maxima.set_scores(multiprocessors % 2 ? 1 : -1);
      workload.reset();
      launch<Spec, Config>(workload.given(), workload.args(), multiprocessors);
      EXPECT_EQ(steps, 2u);
      maxima.expect(scale);
    }
  };
  using Spec = SpecOf<Fp16, 16, 16, true, false, BottomRight>;
  using Eight =
      WithKv<SpecOf<Bf16, 32, 16, false, false, BottomRight>, device::int8, device::KvScale::token_head>;
  expect_far(Spec(), ConfigOf<16, 16, 2, 4>(), 7);
  expect_far(Invariant<Spec>(), ConfigOf<16, 32, 2, 4>(), 4);
  expect_far(Eight(), ConfigOf<16, 32, 2, 8>(), 6);
}

// Warps' and blocks' shares of a row that are far below its other keys count as nothing.
TEST_F(DecodeOnGpu, SharesOfFarKeys) {
  const Case c{
      .heads_q = 2, .heads_kv = 1, .seqlen_q = 3, .seqlen_k = 1300, .lengths_k = {1300}, .seed = 900};
  using Spec = SpecOf<Bf16, 16, 16, false, false>;
  expect<WithFarKeys<Spec, FormulaParams, false>, ConfigOf<16, 16, 2, 8>>(c, {}, 7);
  expect<WithFarKeys<Spec, FormulaParams, true>, ConfigOf<16, 16, 2, 4>>(c, {}, 1);
  expect<Invariant<WithFarKeys<Spec, FormulaParams, true>>, ConfigOf<16, 32, 2, 4>>(c, {}, 5);
}

// One step is enough if each block takes as many whole tiles as the others, and all tiles have equally many
// keys: not by lengths that only the device knows, or with a mask of each batch entry.
TEST_F(DecodeOnGpu, WholeTiles) {
  using Spec = SpecOf<Bf16, 24, 24, false, false, BottomRight>;
  using Config = ConfigOf<16, 32, 2, 8>;
  Case c{.batch = 3,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 2,
         .seqlen_k = 300,
         .masks = verify::MaskDataOptions{},  // none of lengths
         .seed = 40};
  const auto steps_with = [&](int multiprocessors) {
    expect_always<Spec, Config>(c, {CausalMask{}}, multiprocessors);
    return steps;
  };
  EXPECT_EQ(steps_with(6), 1u);
  EXPECT_EQ(steps_with(3), 1u);
  EXPECT_EQ(steps_with(2), 1u);
  EXPECT_EQ(steps_with(5), 2u);
  EXPECT_EQ(steps_with(7), 2u);
  c.seqlen_k = 1100;
  expect_always<Invariant<Spec>, Config>(c, {CausalMask{}}, 2);
  EXPECT_EQ(steps, 1u);
  expect_always<Invariant<Spec>, Config>(c, {CausalMask{}}, 5);
  EXPECT_EQ(steps, 2u);
  c.seqlen_k = 0;
  EXPECT_EQ(steps_with(6), 1u);
  c.seqlen_k = 300;
  c.masks.reset();
  c.lengths_k = {300, 7, 0};
  EXPECT_EQ(steps_with(6), 2u);
}

// Tiles of more rows: two accumulator tiles of a warp, two and four warps for the rows of a tile.
TEST_F(DecodeOnGpu, LargerTiles) {
  std::uint64_t seed = 50;
  for (const auto& [heads_q, rows] : {std::pair{4, 8}, {5, 6}, {1, 64}, {8, 5}}) {
    const Case c{
        .batch = 2, .heads_q = heads_q, .heads_kv = 1, .seqlen_q = rows, .seqlen_k = 260, .seed = ++seed};
    using Spec = SpecOf<Bf16, 16, 24, true, false, BottomRight>;
    expect<Spec, ConfigOf<32, 16, 2, 4>>(c, {CausalMask{}});
    expect<Spec, ConfigOf<64, 32, 2, 8>>(c, {CausalMask{}});
    expect<Spec, ConfigOf<64, 16, 1, 12>>(c, {CausalMask{}});
    expect<Spec, ConfigOf<32, 16, 1, 12>>(c, {CausalMask{}});
  }
  expect<SpecOf<Fp16, 136, 144, false, false>, ConfigOf<64, 16, 1, 8>>(
      {.heads_q = 4, .heads_kv = 2, .seqlen_q = 20, .seqlen_k = 150, .seed = 60}, {});
}

TEST_F(DecodeOnGpu, PageSizesAndLayouts) {
  std::uint64_t seed = 100;
  for (const int page_size : {1, 2, 16, 48, 64, 256})
    expect<SpecOf<Bf16, 24, 40, true, false, BottomRight>, ConfigOf<16, 16, 2, 8>>(
        {.batch = 3,
         .heads_q = 4,
         .heads_kv = 2,
         .seqlen_q = 3,
         .seqlen_k = 400,
         .page_size = page_size,
         .layout = static_cast<MemoryLayout>(seed % 5),
         .layout_kv = static_cast<MemoryLayout>(seed % 5),
         .poison = seed % 2 ? Poison::nan : Poison::infinity,
         .seed = ++seed},
        {CausalMask{}});
}

// A grid of one block, of more blocks than there are steps, and of some that share each long sequence.
TEST_F(DecodeOnGpu, LengthsThatDiffer) {
  std::uint64_t seed = 200;
  for (const int multiprocessors : {1, 40})
    for (const std::vector<int>& lengths : std::vector<std::vector<int>>{
             {0, 900, 1, 3, 0, 65, 500}, {0, 0}, {1}, {1500, 20, 20, 20}, {64, 64, 64}}) {
      const Case c{.batch = static_cast<int>(lengths.size()),
                   .heads_q = 4,
                   .heads_kv = 2,
                   .seqlen_q = 2,
                   .seqlen_k = 1500,
                   .lengths_k = lengths,
                   .seed = ++seed};
      expect<SpecOf<Bf16, 16, 16, true, false, BottomRight>, ConfigOf<16, 16, 2, 4>>(c, {CausalMask{}},
                                                                                     multiprocessors);
    }
}

// More batch entries than a warp has lanes.
TEST_F(DecodeOnGpu, ManyEntries) {
  Case c{.batch = 70, .heads_q = 2, .heads_kv = 1, .seqlen_q = 1, .seqlen_k = 100, .seed = 300};
  for (int i = 0; i < c.batch; ++i) c.lengths_k.push_back(i * 37 % 101);
  expect<SpecOf<Fp16, 16, 16, true, false>, ConfigOf<16, 16, 2, 4>>(c, {});
}

TEST_F(DecodeOnGpu, Masks) {
  using Config = ConfigOf<16, 16, 2, 4>;
  std::uint64_t seed = 400;
  for (const auto& [rows, keys] : {std::pair{1, 300}, {5, 700}, {17, 130}}) {
    const Case c{.batch = 3,
                 .heads_q = 4,
                 .heads_kv = 2,
                 .seqlen_q = rows,
                 .seqlen_k = keys,
                 .poison = seed % 2 ? Poison::infinity : Poison::nan,
                 .seed = ++seed};
    expect<SpecOf<Bf16, 16, 16, true, false, Window>, Config>(c, {SlidingWindowMask{}});
    expect<SpecOf<Bf16, 16, 16, true, false, WindowWithSinks>, Config>(
        c, {SlidingWindowMask{bottom_right, true}});
    expect<SpecOf<Bf16, 16, 16, false, false, device::Tree>, Config>(c, {TreeMask{}});
    expect<SpecOf<Bf16, 16, 16, true, false, BottomRight, WindowWithSinks>, Config>(
        c, {CausalMask{}, SlidingWindowMask{bottom_right, true}});
    expect<SpecOf<Bf16, 16, 16, true, false, BottomRight, device::Tree>, Config>(c,
                                                                                 {CausalMask{}, TreeMask{}});
  }
}

TEST_F(DecodeOnGpu, PackedRows) {
  std::uint64_t seed = 500;
  for (const bool few : {false, true}) {
    const Case c{.heads_q = 4,
                 .heads_kv = 2,
                 .seqlen_k = 300,
                 .lengths_q = few ? std::vector{1, 0, 2} : std::vector{0, 5, 33, 1, 1, 17, 0},
                 .lengths_k = few ? std::vector{300, 7, 0} : std::vector{7, 5, 300, 130, 0, 64, 0},
                 .seed = ++seed};
    expect<SpecOf<Bf16, 16, 16, true, true, BottomRight>, ConfigOf<16, 16, 2, 4>>(c, {CausalMask{}});
    expect<WithFloatOutput<SpecOf<Fp16, 16, 16, false, true>>, ConfigOf<32, 16, 2, 8>>(c, {});
  }
}

TEST_F(DecodeOnGpu, FixedParts) {
  const Case c{.batch = 4,
               .heads_q = 4,
               .heads_kv = 2,
               .seqlen_q = 3,
               .seqlen_k = 1600,
               .lengths_k = {0, 1600, 512, 700},
               .seed = 601};
  using Spec = Invariant<SpecOf<Bf16, 16, 16, true, false, BottomRight>>;
  expect<Spec, ConfigOf<16, 32, 2, 4>>(c, {CausalMask{}}, 1);
  expect<Spec, ConfigOf<16, 32, 2, 8>>(c, {CausalMask{}}, 30);
  expect<Spec, ConfigOf<64, 32, 1, 8>>(c, {CausalMask{}});
  expect<Invariant<SpecOf<Fp16, 16, 16, false, true, WindowWithSinks>>, ConfigOf<32, 32, 1, 8>>(
      {.heads_q = 6,
       .heads_kv = 2,
       .seqlen_k = 1600,
       .lengths_q = {5, 0, 1, 13},
       .lengths_k = {1600, 7, 1, 1100},
       .seed = 602},
      {SlidingWindowMask{bottom_right, true}});
}

// With these windows rows before the compared one see a part more; with sinks, parts are left out.
TEST_F(DecodeInvariant, WindowsAndTiles) {
  constexpr int most = device::fixed_part_keys * 8;
  expect_same<SpecOf<Bf16, 16, 16, true, false, Window>, ConfigOf<16, 32, 1, 8>, ConfigOf<16, 32, 2, 4>,
              ConfigOf<64, 32, 1, 8>, ConfigOf<64, 32, 1, 12>>({SlidingWindowMask{}}, most + 95);
  expect_same<SpecOf<Fp16, 16, 16, true, false, WindowWithSinks>, ConfigOf<16, 32, 1, 8>,
              ConfigOf<32, 32, 1, 8>>({SlidingWindowMask{bottom_right, true}}, most - 600);
}
TEST_F(DecodeInvariant, ManyColumns) {
  expect_same<SpecOf<Bf16, 136, 144, true, false, BottomRight>, ConfigOf<16, 16, 1, 8>,
              ConfigOf<64, 16, 1, 8>>({CausalMask{}});
}
TEST_F(DecodeInvariant, EightBitKeys) {
  using Spec = WithKv<SpecOf<Bf16, 32, 16, true, false, BottomRight>, device::int8, device::KvScale::head>;
  expect_same<Spec, ConfigOf<16, 32, 1, 12>, ConfigOf<16, 32, 1, 8>, ConfigOf<16, 32, 1, 4>>({CausalMask{}});
}

// All bytes, among others, are exact.
template <class Element, class KvElement>
void expect_all_bytes(DType dtype) {
  for (int byte = 0; byte < 256; ++byte) {
    const auto bits = static_cast<std::uint8_t>(byte);
    const double expected = verify::load_element(&bits, dtype, 0);
    if (dtype == DType::fp8_e4m3 && !std::isfinite(expected)) continue;  // may become 480
    constexpr bool in_fp16 = std::is_same_v<Element, Fp16>;
    const auto expect = [&](device::u32 word, int half, int place) {
      const double got = emulator::to_float(Element{}, word >> half * 16 & 0xffff);
      EXPECT_TRUE(got == expected || (std::isnan(got) && std::isnan(expected)))
          << byte << " at " << place << " of " << to_string(dtype) << ": " << got;
    };
    for (int place = 0; place < 4; ++place) {
      device::u32 a, b;
      const device::u32 others = 0x5aa53cc3;
      const device::u32 word = (others & ~(0xffu << place * 8)) | static_cast<device::u32>(byte) << place * 8;
      using Convert = device::ConvertKeys<Element, KvElement>;
      Convert::in_order(word, a, b);
      expect(place / 2 ? b : a, place % 2, place);
      if constexpr (in_fp16) {
        Convert::parted(word, a, b);
        expect(place % 2 ? b : a, place / 2, place);
      }
    }
  }
}
TEST(ConvertKeys, IsExact) {
  expect_all_bytes<Bf16, device::int8>(DType::int8);
  expect_all_bytes<Fp16, device::int8>(DType::int8);
  expect_all_bytes<Bf16, device::fp8_e4m3>(DType::fp8_e4m3);
  expect_all_bytes<Fp16, device::fp8_e4m3>(DType::fp8_e4m3);
  expect_all_bytes<Bf16, device::fp8_e5m2>(DType::fp8_e5m2);
  expect_all_bytes<Fp16, device::fp8_e5m2>(DType::fp8_e5m2);
  for (device::u32 byte = 0; byte < 256; ++byte) {
    if (byte % 128 == 127) continue;  // NaN
    using Convert = device::ConvertKeys<Fp16, device::fp8_e4m3>;
    const device::u32 word = byte | 0x00381100 | byte << 24;
    device::u32 a[2], b[2];
    Convert::by_instruction(device::prmt(word, 0, device::swap_middle_bytes), a[0], a[1]);
    Convert::by_shifts(word, b[0], b[1]);
    EXPECT_EQ(a[0], b[0]) << byte;
    EXPECT_EQ(a[1], b[1]) << byte;
  }
}

// Each dtype and sharing of scales, beside pages, masks, tiles of several warps, fixed parts.
TEST_F(DecodeOnGpu, EightBitKeys) {
  using enum device::KvScale;
  using device::fp8_e4m3, device::fp8_e5m2, device::int8;
  const Case c{.batch = 2, .heads_q = 6, .heads_kv = 2, .seqlen_q = 3, .seqlen_k = 300, .seed = 700};
  const std::vector<Mask> causal = {CausalMask{}};
  using Plain = SpecOf<Bf16, 48, 80, false, false, BottomRight>;
  using Pages = SpecOf<Fp16, 32, 16, true, false, BottomRight>;
  expect<WithKv<Plain, fp8_e4m3, tensor>, ConfigOf<16, 16, 3, 12>>(c, causal);
  expect<WithKv<Plain, fp8_e5m2, head>, ConfigOf<16, 32, 2, 8>>(c, causal);
  expect<WithKv<Plain, int8, token_head>, ConfigOf<32, 16, 2, 4>>(c, causal);
  expect<WithKv<Pages, fp8_e4m3, token_head>, ConfigOf<16, 32, 2, 4>>(c, causal);
  // A block of the grid meets larger and larger scales.
  Case whole = c;
  whole.lengths_k = {300, 300};
  expect<WithKv<Plain, fp8_e5m2, token_head>, ConfigOf<16, 16, 2, 8>>(whole, causal, 1);
  expect<WithKv<Pages, fp8_e5m2, tensor>, ConfigOf<64, 32, 1, 8>>(c, causal);
  expect<WithKv<Pages, int8, head>, ConfigOf<16, 16, 1, 4>>(c, causal);
  // Q does not stay in registers; a tile's sums are merged in several rounds of columns.
  expect<WithKv<SpecOf<Bf16, 208, 144, false, false>, fp8_e4m3, head>, ConfigOf<64, 16, 1, 8>>(
      {.heads_q = 4, .heads_kv = 2, .seqlen_q = 20, .seqlen_k = 150, .seed = 702}, {});
  Case paged = c;
  paged.poison = Poison::nan;
  paged.lengths_k = {300, 37};
  for (const int page_size : {1, 16, 64}) {
    paged.page_size = page_size;
    ++paged.seed;
    expect<WithKv<SpecOf<Bf16, 16, 32, true, false, WindowWithSinks>, fp8_e4m3, token_head>,
           ConfigOf<16, 16, 2, 8>>(paged, {SlidingWindowMask{bottom_right, true}});
  }
  Case fixed = c;
  fixed.seqlen_k = 1300;
  expect<Invariant<WithFloatOutput<WithKv<Pages, int8, token_head>>>, ConfigOf<16, 32, 1, 8>>(fixed, causal);
}

// Each row keeps its precision, whatever scales other rows see.
TEST_F(DecodeOnGpu, FarScalesOfValues) {
  const auto expect_far = [&]<class Spec, class Config>(Spec, Config, int multiprocessors) {
    const Case given{
        .heads_q = 4, .heads_kv = 1, .seqlen_q = 3, .seqlen_k = 100, .lengths_k = {100}, .data = Data::plain};
    for (const FarScales& far : far_scales(given.seqlen_k)) {
      if (!has_turn()) continue;
      Workload workload(host, with_spec<Spec>(given, {CausalMask{}}));
      set_scales(workload, far.keys);
      workload.reset();
      launch<Spec, Config>(workload.given(), workload.args(), multiprocessors);
      EXPECT_TRUE(workload.check()) << far.name;
    }
  };
  using enum device::KvScale;
  using Spec = SpecOf<Bf16, 16, 32, false, false, BottomRight>;
  expect_far(WithKv<Spec, device::int8, token_head>(), ConfigOf<16, 16, 2, 4>(), 1);
  expect_far(WithFloatOutput<WithKv<Spec, device::fp8_e5m2, token_head>>(), ConfigOf<32, 32, 1, 4>(), 3);
}

// Walks of all blocks of a grid cover every unit of every tile once, in order.
TEST(DecodeWork, IsSharedEvenly) {
  using Entry = device::DecodeEntry<device::DecodeCudaSpec, 64>;
  for (const int blocks : {1, 3, 132, 264})
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
      std::vector<int> lengths(1 + verify::random_bits(seed, 0) % 70);
      for (std::size_t i = 0; i < lengths.size(); ++i) {
        const std::uint64_t bits = verify::random_bits(seed, i + 1);
        lengths[i] = static_cast<int>(bits % 8 == 0 ? 0 : bits % 8 == 1 ? bits / 8 % 100000 : bits / 8 % 700);
      }
      device::CudaDecodeParams p{};
      p.batch = static_cast<int>(lengths.size());
      p.num_heads_q = 8;
      p.num_heads_kv = 4;
      p.seqlen_q = static_cast<int>(1 + seed % 20);
      p.seqlen_k = 100000;
      p.seqlens_k = lengths.data();
      p.group = p.tile_heads = 2;
      p.tile_positions = 8;
      p.head_tiles = 1;
      device::u32 units = 0;
      const auto entry_of = [&](int batch) { return Entry(p, batch); };
      for (int b = 0; b < p.batch; ++b) units += static_cast<device::u32>(entry_of(b).all_units());
      const device::EqualShares shares(units, static_cast<device::u32>(blocks), 2);
      int batch = 0, tile = 0, step = 0;  // expected next
      device::u32 before = 0;             // units of entries before `at`
      int at = 0;
      device::u32 most = 0, least = units;
      for (device::u32 block = 0; block < shares.used; ++block) {
        const device::u32 begin = shares.begin(block), end = shares.begin(block + 1);
        ASSERT_EQ(shares.block_of(begin), block);
        ASSERT_EQ(shares.block_of(end - 1), block);
        most = std::max(most, end - begin);
        least = std::min(least, end - begin);
        const auto units_of = [&](int b) { return static_cast<device::u32>(entry_of(b).all_units()); };
        while (before + units_of(at) <= begin) before += units_of(at++);
        device::DecodeWalk<Entry> walk(p, {at, static_cast<int>(begin - before)}, end - begin);
        device::DecodeSegment s;
        device::u32 taken = 0;
        while (walk.next(s)) {
          while (tile == entry_of(batch).tiles) ++batch, tile = 0;
          ASSERT_EQ(walk.batch(), batch);
          ASSERT_EQ(s.tile, tile);
          ASSERT_EQ(s.begin, step);
          const int steps = entry_of(batch).units.count;
          ASSERT_TRUE(!s.starts || s.begin == 0);
          taken += static_cast<device::u32>(s.end - s.begin);
          step = s.end;
          if (s.finishes) {
            ASSERT_EQ(s.end, steps);
            ++tile;
            step = 0;
          }
        }
        ASSERT_LE(taken, end - begin);
      }
      while (batch < p.batch && tile == entry_of(batch).tiles) ++batch, tile = 0;
      EXPECT_EQ(batch, p.batch) << "seed " << seed;
      EXPECT_LE(most - least, 1);
    }
}

// Steps leave out those that no row sees, and no others. The last one of a lane is found across them.
TEST(DecodeWork, LeavesOutKeysBetweenSinksAndWindow) {
  for (const device::Span hull : {device::Span{0, 1000}, {37, 999}, {0, 1}, {0, 0}})
    for (const device::Span gap : {device::Span{0, 0}, {40, 900}, {64, 128}, {63, 129}, {100, 120}, {4, 3}}) {
      const device::KeyUnits steps = device::key_units(hull, gap, 64);
      std::vector<int> wanted, found;
      for (int step = 0; step < 20; ++step) {
        bool any = false;
        for (int key = step * 64; key < step * 64 + 64; ++key)
          any |= hull.contains(key) && !gap.contains(key);
        if (any) wanted.push_back(step);
      }
      for (int i = 0; i < steps.count; ++i) found.push_back(steps.at(i));
      EXPECT_EQ(found, wanted) << hull.begin << " " << hull.end << ", " << gap.begin << " " << gap.end;
      for (const int bound : found)
        for (const int lanes : {1, 2, 8})
          for (int lane = 0; lane < lanes; ++lane) {
            const auto last = std::find_if(found.rbegin(), found.rend(),
                                           [&](int step) { return step <= bound && step % lanes == lane; });
            EXPECT_EQ(steps.last(bound, lane, lanes), last == found.rend() ? -1 : *last);
          }
    }
}

}  // namespace
}  // namespace flashjit::testing_support
