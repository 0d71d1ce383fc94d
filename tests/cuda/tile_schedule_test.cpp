// Every tile of a launch belongs to exactly one block, and no block has much
// more work than the others. Runs the device code of the schedule on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "runtime/cuda/tile_plan.hpp"
#include "runtime/cuda/tile_sections.hpp"
#include "tests/unit/expect_error.h"

namespace {
struct Index {
  unsigned x, y;
};
Index gridDim, blockIdx;
}  // namespace

#include "templates/cuda/tile_order.cuh"
#include "templates/cuda/tile_rows.cuh"
#include "templates/cuda/tile_schedule.cuh"

namespace flashjit {
namespace {

constexpr int block_m = 128;
constexpr std::int64_t cache_bytes = 32 << 20;

struct Launch {
  int batch, heads, seqlen_q;
  int blocks;
  std::int64_t bytes_per_head;
};

int tiles_of(const Launch& launch) {
  return (launch.seqlen_q + block_m - 1) / block_m;
}

cuda::TileSections sections_of(const Launch& launch, int turned = 0, int early_tiles = 0) {
  return cuda::tile_sections(std::max(launch.batch * launch.heads - turned, 1), tiles_of(launch),
                             launch.blocks, launch.bytes_per_head, cache_bytes, early_tiles);
}
int turned_heads_of(const Launch& launch) {
  return cuda::turned_heads(launch.batch * launch.heads, tiles_of(launch), launch.blocks);
}

// The number of key blocks that each block of the grid computes
// under a causal mask. Fails if a tile is missing or comes twice.
// early_tiles: of each head, for which sections have no room.
template <device::TileOrder order>
std::vector<int> loads(const Launch& launch, std::vector<int>* first_tiles = nullptr, int early_tiles = 0,
                       bool backwards = false) {
  const int tiles = tiles_of(launch), heads = launch.batch * launch.heads;
  device::Sm90aForwardParams params{};
  params.parts = 1;
  params.batch = launch.batch;
  params.num_heads_q = launch.heads;
  params.seqlen_q = launch.seqlen_q;
  params.turned_heads = turned_heads_of(launch);
  const cuda::TileSections sections = sections_of(launch, params.turned_heads, early_tiles);
  params.section_heads = sections.heads;
  params.section_rounds = sections.rounds;
  const auto blocks = static_cast<unsigned>(launch.blocks);
  const bool waves = order == device::TileOrder::waves;
  const auto rounds = static_cast<unsigned>((heads * tiles - 1) / launch.blocks + 1);
  gridDim = {blocks, waves ? device::count_waves(rounds) : 1};

  std::vector<int> visits(static_cast<std::size_t>(heads * tiles)), load;
  for (unsigned block = 0; block < gridDim.x * gridDim.y; ++block) {
    blockIdx = {block % blocks, block / blocks};
    device::TileSchedule<order, device::TileRows<block_m, false>, device::EitherWay> schedule(params,
                                                                                              {backwards});
    int work = 0;
    for (device::TileIndex tile; schedule.next(tile);) {
      const int at = (tile.batch * launch.heads + tile.head_q) * tiles + tile.m_block;
      EXPECT_TRUE(tile.head_q < launch.heads && tile.m_block < tiles && at < heads * tiles);
      ++visits.at(static_cast<std::size_t>(at));
      if (work == 0 && first_tiles) first_tiles->push_back(tile.m_block);
      work += tile.m_block + 1;
    }
    load.push_back(work);
  }
  EXPECT_EQ(std::count(visits.begin(), visits.end(), 1), heads * tiles)
      << launch.batch << " x " << launch.heads << " heads, " << launch.seqlen_q << " rows, " << launch.blocks
      << " blocks, " << launch.bytes_per_head << " bytes";
  return load;
}

// sm_80's order: one block for each tile, sections one
// after another, the longest tiles of each section first.
void expect_tiles_in_sections(const Launch& launch) {
  const int tiles = tiles_of(launch), heads = launch.batch * launch.heads;
  device::Sm80ForwardParams params{};
  params.batch = launch.batch;
  params.num_heads_q = launch.heads;
  params.seqlen_q = launch.seqlen_q;
  params.section_heads = sections_of(launch).heads;
  std::vector<int> visits(static_cast<std::size_t>(heads * tiles));
  int section = 0, longest = tiles;
  for (int block = 0; block < heads * tiles; ++block) {
    const auto [batch, head_q, m_block] = device::tile_index(params, block, block_m);
    const int head = batch * launch.heads + head_q;
    ++visits.at(static_cast<std::size_t>(head * tiles + m_block));
    if (head / params.section_heads != section) {
      EXPECT_EQ(head / params.section_heads, ++section);
      longest = tiles;
    }
    EXPECT_LE(m_block, longest);
    longest = m_block;
  }
  EXPECT_EQ(std::count(visits.begin(), visits.end(), 1), heads * tiles);
}

int blocks_of(int heads, int seqlen_q, int multiprocessors) {
  return std::min(heads * ((seqlen_q + block_m - 1) / block_m), multiprocessors);
}

// Half of 32,768 rows of 16 heads, of which the first half sees no late keys. Sections have two heads, and
// their rounds the tiles of the other half; those of the first half come before all of them.
TEST(TileSchedule, EarlyTilesComeFirst) {
  const Launch launch{1, 16, 16384, 132, 16 << 20};
  EXPECT_EQ(sections_of(launch).rounds, 2);
  EXPECT_EQ(sections_of(launch, 0, 64).rounds, 1);
  std::vector<int> first;
  loads<device::TileOrder::sections>(launch, &first, 64, true);
  EXPECT_LT(*std::max_element(first.begin(), first.end()), 16);
}

TEST(TileSchedule, EveryTileOnce) {
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)) + 1; };
  for (int i = 0; i < 300; ++i) {
    Launch launch{up_to(7), up_to(70), up_to(i % 3 ? 1500 : 20000), 0, 0};
    launch.blocks = blocks_of(launch.batch * launch.heads, launch.seqlen_q, up_to(140));
    launch.bytes_per_head = std::int64_t{up_to(1 << 14)} * up_to(1 << 14);
    loads<device::TileOrder::sections>(launch);
    const int early = static_cast<int>(random() % static_cast<unsigned>(tiles_of(launch)));
    EXPECT_EQ(loads<device::TileOrder::sections>(launch, nullptr, early, true),
              loads<device::TileOrder::sections>(launch, nullptr, early));
    loads<device::TileOrder::heads>(launch);
    loads<device::TileOrder::waves>(launch);
    expect_tiles_in_sections(launch);
  }
}

// Sequences of 4,096 to 16,384 tokens, 16,384 in all, on an H200:
// the busiest block has at most 4% more work than the average.
TEST(TileSchedule, SectionsAreEven) {
  for (const int head_dim : {64, 128, 192, 256}) {
    for (const int seqlen : {4096, 8192, 16384}) {
      const int batch = 16384 / seqlen, heads = 2048 / head_dim;
      const std::vector<int> load = loads<device::TileOrder::sections>(
          {batch, heads, seqlen, blocks_of(batch * heads, seqlen, 132), std::int64_t{seqlen} * head_dim * 4});
      const double mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(load.size());
      EXPECT_LE(*std::max_element(load.begin(), load.end()), 1.04 * mean) << head_dim << ", " << seqlen;
    }
  }
}

// Short sequences: neighbours begin with different tiles, and the busiest block has at most 6% more work than
// the average.
TEST(TileSchedule, BlocksOfShortSequencesTakeTurns) {
  for (int tiles = 2; tiles <= 10; ++tiles) {
    const Launch launch{64, 16, tiles * block_m, 132, std::int64_t{tiles} * block_m * 128 * 4};
    EXPECT_GE(turned_heads_of(launch), 132 * 7) << tiles;
    std::vector<int> first_tiles;
    const std::vector<int> load = loads<device::TileOrder::sections>(launch, &first_tiles);
    const double mean = std::accumulate(load.begin(), load.end(), 0.0) / static_cast<double>(load.size());
    EXPECT_LE(*std::max_element(load.begin(), load.end()), 1.06 * mean) << tiles;
    std::array<int, 10> first{};
    for (const int tile : first_tiles) ++first.at(static_cast<std::size_t>(tile));
    for (int tile = 0; tile < tiles; ++tile)
      EXPECT_GE(first.at(static_cast<std::size_t>(tile)), 132 / tiles) << tiles;
  }
}

TEST(TileSections, HeadsThatAreTurned) {
  EXPECT_EQ(cuda::turned_heads(512, 4, 132), 512);
  EXPECT_EQ(cuda::turned_heads(70, 6, 132), 70);
  EXPECT_EQ(cuda::turned_heads(66, 4, 132), 0);     // two rounds
  EXPECT_EQ(cuda::turned_heads(192, 8, 132), 132);  // 60 heads are 3.6 rounds
  EXPECT_EQ(cuda::turned_heads(576, 7, 132), 396);  // 48 heads would be 2.5
  EXPECT_EQ(cuda::turned_heads(576, 11, 132), 0);
}

// Random tiles of 1 to 30 units, 31 for each of 132 multiprocessors. Blocks that start where others
// have ended even out the load, which an equal number of tiles for each multiprocessor would not.
TEST(TileSchedule, WavesEvenOutWhatNobodyKnew) {
  const unsigned seed = std::random_device{}();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  constexpr int draws = 50;
  constexpr unsigned multiprocessors = 132, rounds = 31, waves = device::count_waves(rounds);
  int longer = 0;
  for (int draw = 0; draw < draws; ++draw) {
    std::vector<int> ends(multiprocessors);
    int work = 0;
    for (unsigned wave = 0; wave < waves; ++wave) {
      for (unsigned block = 0; block < multiprocessors; ++block) {
        int& first_free = *std::min_element(ends.begin(), ends.end());
        for (unsigned round = 0; round < device::wave_of(wave, rounds).rounds; ++round) {
          const int tile = static_cast<int>(random() % 30) + 1;
          first_free += tile;
          work += tile;
        }
      }
    }
    longer += *std::max_element(ends.begin(), ends.end()) - work / static_cast<int>(multiprocessors);
  }
  // The excess is 19 to 21; with waves of two thirds 36 to 45, with one wave 120 to 130.
  EXPECT_LE(longer, 25 * draws);
  EXPECT_LE(waves, 5u);
}

TEST(TileSections, OfAnySizes) {
  constexpr int largest = std::numeric_limits<int>::max();
  for (const int blocks : {1, 132}) {
    for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{1} << 62}) {
      for (const auto& [heads, tiles] : {std::pair{largest, 1}, {1, largest}, {1 << 15, 1 << 15}}) {
        const cuda::TileSections sections = cuda::tile_sections(heads, tiles, blocks, bytes, cache_bytes);
        EXPECT_GE(sections.heads, 1);
        EXPECT_LE(sections.heads, heads);
        EXPECT_GE(sections.rounds, 0);
      }
    }
  }
}

// 2^30 keys of 2^24 heads take 2^64 bytes, 2^40 for each head, so no two heads share the cache.
TEST(TilePlan, BytesOfAnyLengths) {
  device::Sm80ForwardParams p{};
  p.batch = 1;
  p.num_heads_q = p.num_heads_kv = 1 << 24;
  p.seqlen_q = 1;
  p.seqlen_k = longest_sequence;
  const AttentionSpec spec{.head_dim = 256, .head_dim_v = 256};
  const Grid grid = cuda::plan_tiles(spec, {.block_m = 128, .block_n = 64}, 108, p);
  EXPECT_EQ(grid.x, 1u << 24);
  EXPECT_EQ(p.section_heads, 108) << "as many as are worked on at a time";
  p.batch = 1 << 8;
  expect_error(ErrorCode::invalid_argument, {"2147483647 blocks", "split the batch"},
               [&] { cuda::plan_tiles(spec, {.block_m = 128, .block_n = 64}, 108, p); });
}

// A launch of few tiles and many keys divides the keys of each tile, if there is a workspace for the parts.
TEST(TilePlan, PartsOfKeysNeedAWorkspace) {
  constexpr int multiprocessors = 132;
  const AttentionSpec spec{.head_dim = 128, .head_dim_v = 128};
  const KernelConfig config{.block_m = 128, .block_n = 128};
  std::vector<float> workspace(cuda::PartsWorkspace(spec, config, multiprocessors, {}).bytes / sizeof(float));
  device::Sm90aForwardParams few{};
  few.batch = 1;
  few.num_heads_q = few.num_heads_kv = 4;
  few.seqlen_q = 100;
  few.seqlen_k = 5000;
  device::Sm90aForwardParams whole = few, many = few;
  const Grid divided = cuda::plan_tiles(spec, config, multiprocessors, workspace.data(), few);
  EXPECT_GT(few.parts, 1);
  EXPECT_EQ(few.parts_o, workspace.data());
  EXPECT_EQ(static_cast<int>(divided.x), 4 * few.parts);
  EXPECT_EQ(cuda::plan_tiles(spec, config, multiprocessors, nullptr, whole).x, 4u);
  EXPECT_EQ(whole.parts, 1) << "no step that merges follows";
  EXPECT_EQ(whole.parts_o, nullptr);
  many.batch = multiprocessors;
  cuda::plan_tiles(spec, config, multiprocessors, workspace.data(), many);
  EXPECT_EQ(many.parts, 1);
}

// With batch_invariant parts begin at fixed keys: blocks of the grid get equally many of them, or none is
// divided.
TEST(TilePlan, FixedPartsOfKeys) {
  constexpr int multiprocessors = 132;
  const AttentionSpec spec{
      .head_dim = 128, .head_dim_v = 128, .mask = {CausalMask{}}, .batch_invariant = true};
  const KernelConfig config{
      .block_m = 128, .block_n = 128, .tile_order = TileOrder::sections, .pack_gqa = true};
  struct Problem {
    int rows, keys, heads_q, heads_kv;
    int parts;
    unsigned blocks;
  };
  for (const Problem& given : {Problem{128, 32768, 32, 8, 4, 128}, Problem{256, 131072, 8, 1, 16, 128},
                               Problem{128, 32768, 34, 1, 4, 68}, Problem{128, 8192, 32, 8, 1, 32},
                               Problem{16384, 16384, 16, 16, 1, 132}, Problem{128, 8320, 32, 8, 1, 32}}) {
    SCOPED_TRACE(std::to_string(given.rows) + " x " + std::to_string(given.keys));
    device::Sm90aForwardParams p{};
    p.batch = 1;
    p.num_heads_q = given.heads_q;
    p.num_heads_kv = given.heads_kv;
    p.seqlen_q = given.rows;
    p.seqlen_k = given.keys;
    const cuda::PartsWorkspace places(spec, config, multiprocessors,
                                      {.batch = 1,
                                       .seqlen_q = given.rows,
                                       .seqlen_k = given.keys,
                                       .num_heads_q = given.heads_q,
                                       .num_heads_kv = given.heads_kv});
    std::vector<float> workspace(places.bytes / sizeof(float) + 1);
    const Grid grid = cuda::plan_tiles(spec, config, multiprocessors, workspace.data(), p);
    EXPECT_EQ(p.parts, given.parts);
    EXPECT_EQ(grid.x, given.blocks);
    if (p.parts == 1) continue;
    const std::int64_t rows = std::int64_t{given.heads_q} * given.rows * given.parts;
    EXPECT_EQ(p.parts_state - workspace.data(), rows * 128);
    EXPECT_LE(static_cast<std::size_t>(rows) * 130 * sizeof(float), places.bytes);
  }
}

TEST(TileSections, HeadsThatShareTheCacheComeTogether) {
  EXPECT_EQ(cuda::tile_sections(32, 64, 132, 4 << 20, cache_bytes).heads, 8);  // 32 MB
  EXPECT_EQ(cuda::tile_sections(4, 64, 132, 4 << 20, cache_bytes).heads, 4);   // all heads
  // 34 = 2 x 17 has no divisor near 8.
  EXPECT_EQ(cuda::tile_sections(34, 64, 132, 4 << 20, cache_bytes).heads, 17 / 2);
  // As many as a round takes.
  EXPECT_EQ(cuda::tile_sections(7, 1, 7, std::int64_t{1} << 40, cache_bytes).heads, 7);
}

}  // namespace
}  // namespace flashjit
