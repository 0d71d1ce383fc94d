// Masks of a shard (templates/shared/offsets.h) keep what the masks of the whole keep of its rows and keys.
#include "shared/offsets.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "shared/block_sparse.h"
#include "shared/sliding_window.h"
#include "shared/tree.h"

namespace flashjit::device {
namespace {

using Params = WithOffsets<ProblemParams>;

struct Shard {
  i64 row, key;
  int rows, keys;
};

Problem problem(int seqlen_q, int seqlen_k) {
  Problem p{};
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  return p;
}

// Walks across tiles of `size` rows or keys: what is skipped is not kept, what is whole is kept.
template <class Axis, int size, class Mask, class Kept>
void check_walks(const Mask& mask, Span rows, Span keys, const Kept& kept) {
  constexpr bool along_keys = std::is_same_v<Axis, Keys>;
  const Span across_all = along_keys ? rows : keys, along_all = along_keys ? keys : rows;
  for (int begin = 0; begin < across_all.end; begin += size) {
    const Span across = {begin, min(begin + size, across_all.end)};
    std::vector<int> visits(static_cast<std::size_t>(ceil_div(along_all.end, size)));  // 2: whole
    BlockWalk<Axis, Mask> walk(mask, across, size);
    for (Block block; walk.next(block);) {
      ASSERT_LT(block.index, static_cast<int>(visits.size()));
      visits[static_cast<std::size_t>(block.index)] = 1 + block.whole;
      if (!along_keys) continue;
      const Span some = intersect(block_span(block.index, size), keys);
      auto tile = mask.template tile<size, size>(block.found);
      for (int row = across.begin; row < across.end; ++row)
        for (int key = some.begin; key < some.end; key += 16) {
          u32 words[1];
          tile.template bits<16>(row, key, words);
          for (int i = 0; i < min(16, some.end - key); ++i)
            ASSERT_EQ(words[0] >> i & 1, kept(row, key + i)) << row << ", " << key + i;
        }
    }
    for (int a = across.begin; a < across.end; ++a)
      for (int b = 0; b < along_all.end; ++b) {
        const bool is_kept = along_keys ? kept(a, b) : kept(b, a);
        const int visit = visits[static_cast<std::size_t>(b / size)];
        ASSERT_TRUE(visit == 1 || is_kept == (visit == 2))
            << (along_keys ? "row " : "key ") << a << ", " << b;
      }
  }
}

// Compares a shard with a mask of the whole. `params` has its data.
template <class Of>
void check(const ProblemParams& params, const Shard& shard) {
  SCOPED_TRACE("rows " + std::to_string(shard.row) + " + " + std::to_string(shard.rows) + ", keys " +
               std::to_string(shard.key) + " + " + std::to_string(shard.keys));
  Params p{params, {&shard.row, &shard.key, 0, 0}};
  p.seqlen_q = shard.rows;
  p.seqlen_k = shard.keys;
  const Of whole(params, problem(longest_whole, longest_whole));
  const Problem own = problem(shard.rows, shard.keys);
  using Mask = Intersect<Bounds, OffsetMask<Of, Params>>;
  const Mask mask(p, own);
  const auto kept = [&](int row, int key) {
    return row < shard.rows && key < shard.keys &&
           whole.keep(static_cast<int>(row + shard.row), static_cast<int>(key + shard.key));
  };
  auto tile = mask.tile();
  for (int row = 0; row < shard.rows; ++row) {
    const Span hull = mask.hull(Keys{}, {row, row + 1});
    for (int key = 0; key < shard.keys; ++key) {
      ASSERT_EQ(mask.keep(row, key), kept(row, key)) << row << ", " << key;
      if (Mask::row_intervals) {
        ASSERT_EQ(hull.contains(key), kept(row, key)) << row << ", " << key;
        const Span rows = mask.hull(Queries{}, {key, key + 1});
        ASSERT_EQ(rows.contains(row), kept(row, key)) << row << ", " << key;
      }
      if (kept(row, key)) {
        ASSERT_TRUE(read_keys(mask, {row, row + 1})({key, key + 1}));
      }
    }
    for (int key = 0; key < shard.keys; key += 80) {
      u32 words[words_of<80>];
      tile.template bits<80>(row, key, words);
      for (int i = 0; i < min(80, shard.keys - key); ++i)
        ASSERT_EQ(words[i / 32] >> i % 32 & 1, kept(row, key + i)) << row << ", " << key + i;
    }
  }
  const Span rows = {0, shard.rows}, keys = {0, shard.keys};
  check_walks<Keys, 16>(mask, rows, keys, kept);
  check_walks<Queries, 16>(mask, rows, keys, kept);
  check_walks<Keys, 48>(mask, rows, keys, kept);
  check_walks<Queries, 48>(mask, rows, keys, kept);
}

constexpr Shard shards[] = {{0, 0, 40, 70},    {32, 0, 20, 90},  {0, 32, 50, 50},   {7, 100, 90, 20},
                            {130, 61, 33, 64}, {64, 96, 64, 96}, {300, 5, 16, 100}, {11, 13, 1, 1}};
// Far from 0, up to the longest sequence.
constexpr Shard far_shards[] = {{longest_whole - 64, longest_whole - 90, 64, 90},
                                {longest_whole - 90, longest_whole - 30, 40, 30}};

template <class Of>
void check_all(const ProblemParams& params, bool far = true) {
  for (const Shard& shard : shards) check<Of>(params, shard);
  for (const Shard& shard : far_shards)
    if (far) check<Of>(params, shard);
}

TEST(Offsets, Causal) {
  check_all<Causal<Align::top_left>>({});
}

TEST(Offsets, Windows) {
  for (const int left : {0, 20, 0x7fffffff})
    for (const int right : {0, 9, 0x7fffffff}) {
      ProblemParams params{};
      params.window_left = left;
      params.window_right = right;
      check_all<SlidingWindow<Align::top_left>>(params);
      for (const int sinks : {0, 4, 70}) {
        params.num_sinks = sinks;
        check_all<SlidingWindowWithSinks<Align::top_left>>(params);
      }
    }
}

// A shard whose keys lie after the sinks reads none of those before its rows' windows.
TEST(Offsets, KeysBetweenSinksAndWindowAreNotRead) {
  ProblemParams params{};
  params.window_left = 10;
  params.num_sinks = 4;
  const Shard shard{200, 100, 8, 120};
  Params p{params, {&shard.row, &shard.key, 0, 0}};
  p.seqlen_q = shard.rows;
  p.seqlen_k = shard.keys;
  const OffsetMask<SlidingWindowWithSinks<Align::top_left>, Params> mask(p, problem(8, 120));
  const ReadKeys reads = read_keys(mask, {0, 8});
  EXPECT_FALSE(reads({0, 90}));
  EXPECT_TRUE(reads({90, 91}));
}

template <int block_m, int block_n>
void check_lists() {
  std::mt19937 random(7);
  constexpr int row_blocks = ceil_div(300, block_m), key_blocks = ceil_div(300, block_n),
                words = block_m * ceil_div(block_n, 32);
  std::vector<int> offsets = {0}, blocks, bitmask_of;
  std::vector<u32> bitmasks;
  for (int i = 0; i < row_blocks; ++i) {
    for (int j = 0; j < key_blocks; ++j) {
      if (random() % 2) continue;
      blocks.push_back(j);
      bitmask_of.push_back(random() % 2 ? -1 : static_cast<int>(bitmasks.size()) / words);
      for (int word = 0; bitmask_of.back() >= 0 && word < words; ++word) bitmasks.push_back(random());
    }
    offsets.push_back(static_cast<int>(blocks.size()));
  }
  ProblemParams params{};
  params.blocks = {.offsets = offsets.data(),
                   .batch_stride = 0,
                   .head_stride = 0,
                   .blocks = blocks.data(),
                   .bitmask_of = bitmask_of.data(),
                   .bitmasks = bitmasks.data(),
                   .row_blocks = row_blocks,
                   .num_blocks = static_cast<int>(blocks.size()),
                   .num_bitmasks = static_cast<int>(bitmasks.size()) / words};
  check_all<BlockSparse<block_m, block_n, false>>(params, false);
}

TEST(Offsets, BlockLists) {
  check_lists<16, 16>();
  check_lists<64, 96>();
  check_lists<80, 48>();
}

TEST(Offsets, Trees) {
  std::mt19937 random(3);
  constexpr int rows = 120, words = 4, prefix = 37;
  std::vector<u32> bits(rows * words);
  for (u32& word : bits) word = random();
  ProblemParams params{};
  params.tree = {bits.data(), 0, words, rows, words, &prefix};
  check_all<Tree>(params, false);
}

}  // namespace
}  // namespace flashjit::device
