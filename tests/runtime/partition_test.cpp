#include "runtime/cpu/partition.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace flashjit {
namespace {

constexpr KernelConfig config{.block_m = 384, .block_n = 128, .num_stages = 1, .num_warps = 1};

AttentionSpec spec_with(std::vector<Mask> mask = {}) {
  AttentionSpec spec;
  spec.head_dim = spec.head_dim_v = 128;
  spec.mask = std::move(mask);
  return spec;
}

device::ForwardParams sizes(int batch, int heads_q, int heads_kv, int seqlen_q, int seqlen_k) {
  device::ForwardParams params{};
  params.batch = batch;
  params.num_heads_q = heads_q;
  params.num_heads_kv = heads_kv;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  return params;
}

const Target vectors = Target::parse("x86-64-v4"), amx = Target::parse("x86-64-v4+amx");

Partition cut_of(const device::ForwardParams& params, const AttentionSpec& spec, int num_threads) {
  return partition(params, spec, vectors, config, num_threads);
}

TEST(Partition, CoversEveryRowWithinTheConfig) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto upto = [&](int most) { return std::uniform_int_distribution(1, most)(random); };
  const std::vector<Mask> masks[] = {
      {}, {CausalMask{}}, {BlockSparseMask{64, 64}}, {BlockSparseMask{256, 16, true}}};
  for (int i = 0; i < 5000; ++i) {
    const int heads_per_kv_head = upto(9), heads_kv = upto(9), threads = upto(i % 2 ? 4 : 200);
    const KernelConfig c{.block_m = 16 * upto(24), .block_n = 16 * upto(32), .num_stages = 1, .num_warps = 1};
    const device::ForwardParams p = sizes(upto(3), heads_per_kv_head * heads_kv, heads_kv,
                                          upto(i % 3 ? 500 : 20000), upto(i % 5 ? 5000 : 10));
    const Partition cut = partition(p, spec_with(masks[i % 4]), i % 7 ? vectors : amx, c, threads);
    ASSERT_TRUE(cut.packed_heads == 1 || cut.packed_heads == heads_per_kv_head);
    ASSERT_GT(cut.tile_rows, 0);
    ASSERT_LE(cut.tile_rows, c.block_m);
    ASSERT_EQ(cut.tile_rows % 16, 0);
    const int rows = p.seqlen_q * cut.packed_heads;
    ASSERT_EQ(cut.tiles, std::int64_t{p.batch} * p.num_heads_q / cut.packed_heads *
                             ((rows + cut.tile_rows - 1) / cut.tile_rows));
    ASSERT_GE(cut.key_parts, 1);
    ASSERT_LE(cut.key_parts, std::max(1, (p.seqlen_k + c.block_n - 1) / c.block_n));
    ASSERT_GE(cut.packed_blocks, 1);
    ASSERT_LE(cut.packed_blocks, std::max(1, (p.seqlen_k + c.block_n - 1) / c.block_n));
    ASSERT_GE(cut.pieces, 1);
    ASSERT_LE(cut.pieces, cut.tiles * cut.key_parts);
    if (threads == 1) {
      ASSERT_EQ(cut.pieces * cut.key_parts, 1);
    }
  }
}

TEST(Partition, OfAnySizes) {
  constexpr int largest = std::numeric_limits<int>::max();
  for (const int rows : {1 << 30, largest - 400, largest})
    for (const int threads : {1, 2, largest})
      for (const auto& spec : {spec_with(), spec_with({BlockSparseMask{256, 16}})})
        for (const Target& target : {vectors, amx}) {
          device::ForwardParams p = sizes(1, 2, 1, rows, rows);
          Partition cut = partition(p, spec, target, config, threads);
          EXPECT_EQ(cut.tiles, std::int64_t{2} * ((std::int64_t{rows} + cut.tile_rows - 1) / cut.tile_rows));
          EXPECT_GE(cut.pieces, 1);
          EXPECT_LE(cut.pieces, cut.tiles * cut.key_parts);
          // Many query heads of one key/value head: 2^31 rows in a tile would be beyond an int.
          p = sizes(1, rows, 1, 100, rows);
          cut = partition(p, spec, target, config, threads);
          EXPECT_EQ(cut.packed_heads, 1);
          EXPECT_EQ(cut.tiles, std::int64_t{rows} * ((100 + cut.tile_rows - 1) / cut.tile_rows));
          EXPECT_GE(cut.pieces, 1);
          EXPECT_LE(cut.pieces, cut.tiles * cut.key_parts);
        }
}

TEST(Partition, RoomForPartsIsEnough) {
  for (const int threads : {2, 3, 8, 64})
    for (const int heads : {1, 2, 7})
      for (const int rows : {1, 16, 100, 1000}) {
        const Partition cut = cut_of(sizes(1, heads, heads, rows, 1 << 20), spec_with(), threads);
        EXPECT_TRUE(cut.key_parts == 1 || cut.tiles * cut.key_parts <= most_items_in_parts(threads));
      }
}

TEST(Partition, BlocksStayPackedForAThreadsNextTiles) {
  const device::ForwardParams eleven_tiles = sizes(1, 8, 8, 4096, 4096);
  EXPECT_EQ(cut_of(eleven_tiles, spec_with(), 1).packed_blocks, 32);
  EXPECT_EQ(cut_of(eleven_tiles, spec_with(), 5).packed_blocks, 32);
  EXPECT_EQ(cut_of(eleven_tiles, spec_with(), 8).packed_blocks, 1) << "each has one of them or two";
  EXPECT_EQ(cut_of(sizes(1, 32, 8, 4096, 4096), spec_with(), 16).packed_blocks, 32)
      << "four heads share them";
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 300, 4096), spec_with(), 1).packed_blocks, 1);
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 4096, 0), spec_with(), 1).packed_blocks, 1) << "no keys";
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 16384, 16384), spec_with(), 1).packed_blocks, 1) << "18 MB";
  EXPECT_EQ(cut_of(sizes(1, 1, 1, 64, 65536), spec_with(), 8).packed_blocks, 1) << "parts of keys";
}

TEST(Partition, LargeTilesForFewThreads) {
  const Partition one = cut_of(sizes(1, 8, 8, 4096, 4096), spec_with(), 1);
  EXPECT_EQ(one.tiles, 8 * 11);  // tiles of at most 384 rows
  const Partition two = cut_of(sizes(1, 8, 8, 128, 128), spec_with(), 2);
  EXPECT_EQ(two.tile_rows, 128);
  EXPECT_EQ(two.tiles, 8);
}

TEST(Partition, WorkForEveryThread) {
  for (const int threads : {2, 3, 8, 64})
    for (const auto& [heads, rows, keys] :
         {std::tuple{1, 128, 4096}, {1, 2048, 2048}, {2, 16, 32768}, {8, 512, 1024}, {1, 1, 131072}}) {
      const Partition cut = cut_of(sizes(1, heads, heads, rows, keys), spec_with(), threads);
      EXPECT_GE(cut.pieces, threads) << threads << " threads, " << heads << " heads, " << rows << " x "
                                     << keys;
    }
}

TEST(Partition, SmallTilesBeforePartsOfKeys) {
  const Partition cut = cut_of(sizes(1, 1, 1, 1024, 1024), spec_with({CausalMask{}}), 4);
  EXPECT_EQ(cut.key_parts, 1);
  EXPECT_GE(cut.tiles, 4);
}

TEST(Partition, PartsOfKeysWhereRowsDoNotSuffice) {
  EXPECT_EQ(cut_of(sizes(1, 1, 1, 1, 65536), spec_with(), 8).key_parts, 8);
  AttentionSpec wide = spec_with();
  wide.head_dim = wide.head_dim_v = 1024;
  EXPECT_EQ(cut_of(sizes(1, 1, 1, 1, 256), wide, 64).key_parts, 2) << "no more than blocks";
}

TEST(Partition, WhatIsShortStaysOnTheCallersThread) {
  EXPECT_EQ(cut_of(sizes(1, 1, 1, 1, 1), spec_with(), 64).pieces, 1);
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 16, 16), spec_with(), 64).pieces, 1);
}

// Bytes of K and V occupy threads, not multiply-adds: half as many of 16-bit, or 8-bit, keys as of float32.
TEST(Partition, FewRowsAreCountedInBytes) {
  AttentionSpec of_fp32 = spec_with(), of_8bit = spec_with();
  of_fp32.dtype = DType::fp32;
  of_8bit.kv_dtype = DType::int8;
  for (const Target& target : {vectors, amx}) {
    const auto pieces = [&](const AttentionSpec& spec, int heads_q, int rows, int keys) {
      return partition(sizes(1, heads_q, 8, rows, keys), spec, target, config, 64).pieces;
    };
    EXPECT_EQ(pieces(spec_with(), 8, 1, 64), 2) << "2 * 128 kB";
    EXPECT_EQ(pieces(of_fp32, 8, 1, 64), 4);
    EXPECT_EQ(pieces(of_8bit, 8, 1, 64), 1);
    EXPECT_EQ(pieces(of_fp32, 16, 8, 32), 2) << "two heads share 8 * 32 keys";
  }
}

TEST(Partition, HeadsOfFewRowsTakeTurns) {
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 4, 4096), spec_with(), 2).pieces, 4) << "two heads each";
  EXPECT_EQ(cut_of(sizes(4, 32, 32, 4, 4096), spec_with(), 2).pieces, 16) << "eight heads each";
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 4, 4096), spec_with(), 8).pieces, 8);
  EXPECT_EQ(cut_of(sizes(1, 8, 8, 17, 4096), spec_with(), 2).pieces, 8) << "rows are many";
}

TEST(Partition, HeadsOfAGroupShareTilesWhereRowsAreFew) {
  EXPECT_EQ(cut_of(sizes(2, 32, 8, 1, 4096), spec_with(), 1).packed_heads, 4);
  EXPECT_EQ(cut_of(sizes(2, 32, 8, 1, 4096), spec_with(), 1).tiles, 16);
  EXPECT_EQ(cut_of(sizes(2, 32, 8, 4096, 4096), spec_with(), 1).packed_heads, 1);
  EXPECT_EQ(cut_of(sizes(2, 32, 8, 1, 4096), spec_with({BlockSparseMask{64, 64, true}}), 1).packed_heads, 1)
      << "heads have lists of their own";
}

TEST(Partition, TilesOfWholeLists) {
  for (const int threads : {1, 2, 5})
    EXPECT_EQ(
        cut_of(sizes(1, 2, 2, 4000, 4000), spec_with({BlockSparseMask{128, 64}}), threads).tile_rows % 128,
        0);
}

TEST(Partition, SmallTilesOfListsWhereAmxFindsBlocksPacked) {
  const KernelConfig large{.block_m = 768, .block_n = 128, .num_stages = 1, .num_warps = 1};
  const auto rows_of = [&](int list_rows, int keys, int threads, const Target& target) {
    return partition(sizes(1, 8, 8, keys, keys), spec_with({BlockSparseMask{list_rows, 128}}), target, large,
                     threads)
        .tile_rows;
  };
  EXPECT_EQ(rows_of(64, 4096, 1, amx), 128);
  EXPECT_EQ(rows_of(128, 4096, 1, amx), 128);
  EXPECT_EQ(rows_of(256, 4096, 1, amx), 256);
  EXPECT_EQ(rows_of(128, 32768, 1, amx), 768) << "16 MB do not stay";
  EXPECT_EQ(rows_of(128, 4096, 16, amx), 128);
  EXPECT_GT(rows_of(128, 4096, 17, amx), 128) << "not two of a head for each thread";
  EXPECT_EQ(rows_of(128, 4096, 1, vectors), 768);
}

}  // namespace
}  // namespace flashjit
