// Compares the mask walks of templates/shared/mask.h with brute force, in both directions.
#include "shared/mask.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "shared/listed_mask.h"
#include "shared/read_keys.h"
#include "shared/sliding_window.h"
#include "shared/tree.h"

namespace flashjit::device {
namespace {

using Kept = std::function<bool(int row, int key)>;

struct Visit {
  int index;
  bool whole;
  int found;
  bool operator==(const Visit&) const = default;
};

template <class Axis, class Mask>
std::vector<Visit> walk(const Mask& mask, Span across, int size, Span within) {
  BlockWalk<Axis, Mask> blocks(mask, across, size, within);
  std::vector<Visit> visits;
  for (Block block; blocks.next(block);) visits.push_back({block.index, block.whole, block.found});
  Block block;
  EXPECT_FALSE(blocks.next(block)) << "a walk that has ended stays so";
  return visits;
}

Problem problem(int seqlen_q, int seqlen_k) {
  Problem p{};
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  return p;
}

Span rows_of(Keys, Span across, Span) {
  return across;
}
Span rows_of(Queries, Span, Span along) {
  return along;
}
Span keys_of(Keys, Span, Span along) {
  return along;
}
Span keys_of(Queries, Span across, Span) {
  return across;
}

bool any(Span rows, Span keys, const Kept& kept) {
  for (int i = rows.begin; i < rows.end; ++i)
    for (int j = keys.begin; j < keys.end; ++j)
      if (kept(i, j)) return true;
  return false;
}
bool all(Span rows, Span keys, const Kept& kept) {
  return !any(rows, keys, [&](int i, int j) { return !kept(i, j); });
}

// Checks the bits of `tile` for row i's keys within `within`, `n` keys at a time.
template <int n, class Tile>
void check_bits(Tile tile, int i, Span within, const Kept& kept) {
  for (int j = within.begin / n * n; j < within.end; j += n) {
    u32 words[words_of<n>];
    tile.template bits<n>(i, j, words);
    for (int bit = 0; bit < n; ++bit)
      ASSERT_EQ(words[bit / 32] >> bit % 32 & 1, kept(i, j + bit)) << n << " keys: " << i << ", " << j + bit;
  }
}

// Predicates answer for every pair; they are false outside the sequences. `certain` implies `kept`: the walk
// claims a block whole exactly if `certain` holds for all its pairs. Every mask of `masks` may justify a
// visit by itself: the interface allows a visit in which each mask keeps something, though not the same pair.
template <class Axis, class Mask>
void check_walk(const Mask& mask, int seqlen_q, Span across, int size, int blocks, Span share,
                const Kept& kept, const Kept& certain, const std::vector<Kept>& masks) {
  const Span within = {share.begin * size, share.end * size};
  const std::vector<Visit> visits = walk<Axis>(mask, across, size, within);
  ASSERT_EQ(visits, (walk<Axis>(mask, across, size, within))) << "producer and consumer walk apart";

  std::size_t at = 0;
  for (int index = share.end - 1; index >= share.begin; --index) {
    const Span along = block_span(index, size);
    const Span rows = rows_of(Axis{}, across, along), keys = keys_of(Axis{}, across, along);
    const bool visited = at < visits.size() && visits[at].index == index;
    if (!visited) {
      ASSERT_FALSE(any(rows, keys, kept)) << "missed block " << index;
      continue;
    }
    ASSERT_LT(index, blocks);
    for (const Kept& one : masks) ASSERT_TRUE(any(rows, keys, one)) << "needless visit of block " << index;
    ASSERT_EQ(visits[at].whole, all(rows, keys, certain)) << "block " << index;
    const typename Mask::Tile tile = mask.tile(),
                              of_block = mask.template tile<unknown_size, unknown_size>(visits[at].found);
    for (int i = rows.begin; i < rows.end; ++i) {
      for (int j = keys.begin; j < keys.end; ++j) ASSERT_EQ(mask.keep(i, j), kept(i, j)) << i << ", " << j;
      if (i >= seqlen_q) continue;
      check_bits<16>(tile, i, keys, kept);
      check_bits<32>(tile, i, keys, kept);
      check_bits<80>(tile, i, keys, kept);
      if (size % 16 == 0) check_bits<16>(of_block, i, keys, kept);
      if (size % 64 == 0) check_bits<64>(of_block, i, keys, kept);
    }
    if (testing::Test::HasFatalFailure()) return;
    ++at;
  }
  ASSERT_EQ(at, visits.size()) << "visits out of order, twice or outside the share";
}

// Checks all tiles across the axis; for each the whole walk and every share of it.
template <class Axis, class Mask>
void check_axis(const Mask& mask, int seqlen_q, int seqlen_across, int seqlen_along, int size_across,
                int size_along, const Kept& kept, const Kept& certain, const std::vector<Kept>& masks) {
  const int blocks = ceil_div(seqlen_along, size_along);
  for (int begin = 0; begin < seqlen_across; begin += size_across) {
    const Span across = {begin, min(begin + size_across, seqlen_across)};
    for (int first = 0; first <= blocks; ++first) {
      for (int last = first; last <= blocks; ++last) {
        check_walk<Axis>(mask, seqlen_q, across, size_along, blocks, {first, last}, kept, certain, masks);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    ASSERT_EQ((walk<Axis>(mask, across, size_along, {0, 0x7fffffff})),
              (walk<Axis>(mask, across, size_along, {0, blocks * size_along})));
  }
}

// The keys of read_keys() are all that tiles of rows keep; `exact`: and no others.
template <class Mask>
void check_reads(const Mask& mask, const Problem& p, int size, const Kept& kept, bool exact) {
  for (int begin = 0; begin < p.seqlen_q; begin += size) {
    const Span rows = {begin, min(begin + size, p.seqlen_q)};
    const ReadKeys reads = read_keys(mask, rows);
    for (int key = 0; key < p.seqlen_k + 3; ++key)
      for (const int keys : {1, 4}) {
        const bool keeps = any(rows, {key, key + keys}, kept);
        ASSERT_TRUE(exact ? reads({key, key + keys}) == keeps : reads({key, key + keys}) || !keeps)
            << "rows from " << begin << ", keys from " << key;
      }
  }
}

// A mask of intervals keeps an interval of rows for each key, too, and gives it: sm_90a's backward masks by
// it.
template <class Mask>
void check_rows_of_keys(const Mask& mask, const Problem& p, const Kept& kept) {
  for (int key = 0; key < p.seqlen_k; ++key) {
    const Span rows = mask.hull(Queries{}, {key, key + 1});
    for (int row = 0; row < p.seqlen_q; ++row)
      ASSERT_EQ(rows.contains(row), kept(row, key)) << "row " << row << ", key " << key;
  }
}

template <class Mask>
void check_both_ways(const Mask& mask, const Problem& p, int size_m, int size_n, const Kept& kept,
                     const Kept& certain, const std::vector<Kept>& masks) {
  SCOPED_TRACE("seqlen_q " + std::to_string(p.seqlen_q) + ", seqlen_k " + std::to_string(p.seqlen_k) +
               ", blocks " + std::to_string(size_m) + " x " + std::to_string(size_n));
  check_axis<Keys>(mask, p.seqlen_q, p.seqlen_q, p.seqlen_k, size_m, size_n, kept, certain, masks);
  if (testing::Test::HasFatalFailure()) return;
  check_axis<Queries>(mask, p.seqlen_q, p.seqlen_k, p.seqlen_q, size_n, size_m, kept, certain, masks);
  if (testing::Test::HasFatalFailure()) return;
  check_reads(mask, p, size_m, kept, false);
  if constexpr (Mask::row_intervals) check_rows_of_keys(mask, p, kept);
}

Kept inside(const Problem& p) {
  return [=](int i, int j) { return i < p.seqlen_q && j < p.seqlen_k; };
}
Kept causal(const Problem& p, Align align) {
  const int shift = align == Align::bottom_right ? p.seqlen_k - p.seqlen_q : 0;
  return [=](int i, int j) { return i < p.seqlen_q && j < p.seqlen_k && j <= i + shift; };
}
Kept both(const Kept& a, const Kept& b) {
  return [=](int i, int j) { return a(i, j) && b(i, j); };
}

constexpr int longest = 13;

template <class Mask, class MakeKept>
void check_intervals(MakeKept make_kept) {
  static_assert(Mask::row_intervals && !Mask::per_head);
  for (int seqlen_q = 0; seqlen_q <= longest; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= longest; ++seqlen_k) {
      const Problem p = problem(seqlen_q, seqlen_k);
      const Mask mask(ProblemParams{}, p);
      const Kept kept = make_kept(p);
      for (int row = 0; row < seqlen_q; ++row) {
        const Span hull = mask.hull(Keys{}, {row, row + 1});
        for (int key = 0; key < longest + 4; ++key)
          ASSERT_EQ(hull.contains(key), kept(row, key)) << row << ", " << key;
      }
      check_reads(mask, p, 4, kept, true);
      for (int size_m : {1, 4, 6}) {
        for (int size_n : {1, 3, 8}) {
          check_both_ways(mask, p, size_m, size_n, kept, kept, {kept});
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Mask, Bounds) {
  check_intervals<Intersect<Bounds>>([](const Problem& p) { return inside(p); });
}
TEST(Mask, CausalBottomRight) {
  check_intervals<Intersect<Bounds, Causal<Align::bottom_right>>>(
      [](const Problem& p) { return causal(p, Align::bottom_right); });
}
TEST(Mask, CausalTopLeft) {
  check_intervals<Intersect<Bounds, Causal<Align::top_left>>>(
      [](const Problem& p) { return causal(p, Align::top_left); });
}
TEST(Mask, BothCausal) {
  check_intervals<Intersect<Bounds, Causal<Align::bottom_right>, Causal<Align::top_left>>>(
      [](const Problem& p) { return both(causal(p, Align::bottom_right), causal(p, Align::top_left)); });
}

// Lengths near the end of int: nothing overflows, and exactly the needed blocks are visited.
TEST(Mask, LongSequences) {
  const int long_q = 0x40000000, long_k = 0x7fffff00, size = 128;
  const Problem p = problem(long_q, long_k);
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  const Mask mask(ProblemParams{}, p);
  const Span last_tile = {long_q - size, long_q};
  BlockWalk<Keys, Mask> walk(mask, last_tile, size);
  Block block;
  ASSERT_TRUE(walk.next(block));
  EXPECT_EQ(block.index, long_k / size - 1);
  EXPECT_FALSE(block.whole);
  ASSERT_TRUE(walk.next(block));
  EXPECT_TRUE(block.whole);
  const Span last_keys = {long_k - size, long_k};
  EXPECT_EQ((device::walk<Queries>(mask, last_keys, size, {0, 0x7fffffff})),
            (std::vector<Visit>{{long_q / size - 1, false, not_found}}));
}

// Query heads of one key/value head are packed head by head within
// a position. A packed tile asks for the positions that it covers.
TEST(Mask, PackedRows) {
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  for (int packed_heads : {1, 2, 3, 8}) {
    for (int seqlen_q = 1; seqlen_q <= 9; ++seqlen_q) {
      for (int seqlen_k = 0; seqlen_k <= longest; ++seqlen_k) {
        const Problem p = problem(seqlen_q, seqlen_k);
        const Mask mask(ProblemParams{}, p);
        const Kept kept = causal(p, Align::bottom_right);
        const Kept packed_kept = [&](int row, int key) { return kept(row / packed_heads, key); };
        const int packed_rows = seqlen_q * packed_heads, size_m = 4, size_n = 3;
        for (int begin = 0; begin < packed_rows; begin += size_m) {
          const Span packed = {begin, min(begin + size_m, packed_rows)};
          const Span across = {packed.begin / packed_heads, ceil_div(packed.end, packed_heads)};
          std::vector<bool> visited(ceil_div(longest, size_n) + 1);
          for (const Visit& visit : walk<Keys>(mask, across, size_n, {0, 0x7fffffff})) {
            visited[visit.index] = true;
            const Span keys = block_span(visit.index, size_n);
            ASSERT_TRUE(any(packed, keys, packed_kept));
            ASSERT_EQ(visit.whole, all(packed, keys, packed_kept));
          }
          for (int index = 0; index < static_cast<int>(visited.size()); ++index) {
            ASSERT_EQ(visited[index], any(packed, block_span(index, size_n), packed_kept));
          }
        }
      }
    }
  }
}

Kept window(const Problem& p, Align align, int left, int right, int num_sinks) {
  const int shift = align == Align::bottom_right ? p.seqlen_k - p.seqlen_q : 0;
  return both(inside(p), [=](int i, int j) {
    const long distance = long{j} - (i + shift);
    return j < num_sinks || (-distance <= left && distance <= right);
  });
}

constexpr int unbounded = 0x7fffffff;

template <Align align>
void check_windows() {
  for (const int left : {0, 2, unbounded}) {
    for (const int right : {0, 3, unbounded}) {
      for (int seqlen_q = 0; seqlen_q <= longest; seqlen_q += 3) {
        for (int seqlen_k = 0; seqlen_k <= longest; seqlen_k += 3) {
          const Problem p = problem(seqlen_q, seqlen_k);
          for (const int num_sinks : {0, 2, longest + 2}) {
            ProblemParams params{};
            params.window_left = left;
            params.window_right = right;
            params.num_sinks = num_sinks;
            const Kept kept = window(p, align, left, right, num_sinks);
            for (const int size : {1, 4}) {
              if (num_sinks == 0) {
                using Mask = Intersect<Bounds, SlidingWindow<align>>;
                check_both_ways(Mask(params, p), p, size, size, kept, kept, {kept});
              }
              using Mask = Intersect<Bounds, SlidingWindowWithSinks<align>>;
              static_assert(!Mask::row_intervals);
              check_both_ways(Mask(params, p), p, size, size, kept, kept, {});
              check_reads(Mask(params, p), p, size, kept, true);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(Mask, SlidingWindowBottomRight) {
  check_windows<Align::bottom_right>();
}
TEST(Mask, SlidingWindowTopLeft) {
  check_windows<Align::top_left>();
}

// Random blocks that keep none, all or some of their pairs.
template <int size_m, int size_n>
class RandomBlocks {
 public:
  RandomBlocks(std::mt19937& random, const Problem& p, double density)
      : row_blocks_(ceil_div(p.seqlen_q, size_m)), key_blocks_(ceil_div(p.seqlen_k, size_n)) {
    std::bernoulli_distribution listed(density), partial(0.4);
    for (int i = 0; i < row_blocks_; ++i) {
      for (int j = 0; j < key_blocks_; ++j) {
        if (!listed(random)) continue;
        blocks_.push_back(j);
        bitmask_of_.push_back(partial(random) ? static_cast<int>(bitmasks_.size()) / words : -1);
        for (int word = 0; bitmask_of_.back() >= 0 && word < words; ++word) bitmasks_.push_back(random());
      }
      offsets_.push_back(static_cast<int>(blocks_.size()));
    }
  }

  ProblemParams params() const {
    ProblemParams p{};
    p.blocks = {.offsets = offsets_.data(),
                .batch_stride = 0,
                .head_stride = 0,
                .blocks = blocks_.data(),
                .bitmask_of = bitmask_of_.data(),
                .bitmasks = bitmasks_.data(),
                .row_blocks = row_blocks_,
                .num_blocks = static_cast<int>(blocks_.size()),
                .num_bitmasks = static_cast<int>(bitmasks_.size()) / words};
    return p;
  }
  // Makes them lists of a mask: each block is tested by the mask or, if the mask keeps all of it, is whole
  // or, if it keeps a part, has a bitmask of that part.
  void make_of(std::mt19937& random, const Problem& p, const Kept& mask) {
    bitmasks_.clear();
    for (int m = 0; m < row_blocks_; ++m)
      for (int e = offsets_[m]; e < offsets_[m + 1]; ++e) {
        const Span rows = {m * size_m, min((m + 1) * size_m, p.seqlen_q)},
                   keys = {blocks_[e] * size_n, min((blocks_[e] + 1) * size_n, p.seqlen_k)};
        bitmask_of_[e] = -2;
        if (random() % 3 == 0) continue;
        if (all(rows, keys, mask)) {
          bitmask_of_[e] = -1;
          continue;
        }
        bitmask_of_[e] = static_cast<int>(bitmasks_.size()) / words;
        const std::size_t first = bitmasks_.size();
        bitmasks_.resize(first + words);
        for (int i = rows.begin; i < rows.end; ++i)
          for (int j = keys.begin; j < keys.end; ++j)
            if (mask(i, j))
              bitmasks_[first + i % size_m * words_per_row + j % size_n / 32] |= 1u << j % size_n % 32;
      }
  }
  bool listed(int row, int key) const { return find(row, key) >= 0; }
  bool whole(int row, int key) const {
    const int entry = find(row, key);
    return entry >= 0 && bitmask_of_[entry] == -1;
  }
  bool full(int row, int key) const {
    const int entry = find(row, key);
    return entry >= 0 && bitmask_of_[entry] < 0;
  }
  bool kept(int row, int key) const {
    const int entry = find(row, key);
    if (entry < 0 || bitmask_of_[entry] < 0) return entry >= 0;
    const int word = bitmask_of_[entry] * words + row % size_m * words_per_row + key % size_n / 32;
    return bitmasks_[word] >> key % size_n % 32 & 1;
  }

 private:
  static constexpr int words_per_row = ceil_div(size_n, 32), words = size_m * words_per_row;

  int find(int row, int key) const {
    const int m = row / size_m;
    if (m >= row_blocks_) return -1;
    for (int e = offsets_[m]; e < offsets_[m + 1]; ++e)
      if (blocks_[e] == key / size_n) return e;
    return -1;
  }

  int row_blocks_, key_blocks_;
  std::vector<int> offsets_ = {0}, blocks_, bitmask_of_;
  std::vector<u32> bitmasks_;
};

// Tiles are smaller than, equal to and larger than the listed blocks,
// so that a walk covers part of a list, one list and several.
template <class... Others, class MakeKept>
void check_block_lists(MakeKept make_kept) {
  constexpr int size_m = 16, size_n = 48;
  using Mask = Intersect<Bounds, BlockSparse<size_m, size_n, false>, Others...>;
  static_assert(!Mask::row_intervals);
  const unsigned seed = 20240917;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const Problem p = problem(random() % 90, random() % 230);
    const RandomBlocks<size_m, size_n> blocks(random, p, (random() % 5) / 4.0);
    ProblemParams params = blocks.params();
    params.window_left = 40;
    params.num_sinks = 20;
    const Mask mask(params, p);
    const Kept other = make_kept(p);
    const Kept listed = [&](int i, int j) { return blocks.listed(i, j); };
    const Kept kept = [&](int i, int j) { return other(i, j) && blocks.kept(i, j); };
    const Kept certain = [&](int i, int j) { return other(i, j) && blocks.full(i, j); };
    for (const auto& [tile_m, tile_n] : {std::pair{8, 16}, std::pair{16, 48}, std::pair{40, 96}}) {
      check_both_ways(mask, p, tile_m, tile_n, kept, certain, {other, listed});
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Mask, BlockSparse) {
  check_block_lists<>(inside);
}
TEST(Mask, BlockSparseAndCausal) {
  check_block_lists<Causal<Align::bottom_right>>(
      [](const Problem& p) { return causal(p, Align::bottom_right); });
}
// Two masks whose hulls do not show the blocks that the other one skips.
TEST(Mask, BlockSparseAndSlidingWindowWithSinks) {
  check_block_lists<SlidingWindowWithSinks<Align::bottom_right>>(
      [](const Problem& p) { return window(p, Align::bottom_right, 40, 0, 20); });
}

// Lists of other masks: those test the blocks that are neither whole nor have a bitmask.
template <class... Others, class MakeKept>
void check_listed(MakeKept make_kept) {
  constexpr int size_m = 16, size_n = 48;
  using Mask = Intersect<Bounds, Listed<BlockSparse<size_m, size_n, false, true>, Intersect<Others...>>>;
  static_assert(Mask::list_rows == size_m && !Mask::row_intervals);
  const unsigned seed = 20261124;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 10; ++repeat) {
    const Problem p = problem(random() % 90, random() % 230);
    const Kept other = make_kept(p);
    RandomBlocks<size_m, size_n> blocks(random, p, (random() % 5) / 4.0);
    blocks.make_of(random, p, other);
    ProblemParams params = blocks.params();
    params.window_left = 40;
    params.num_sinks = 20;
    const Mask mask(params, p);
    const Kept listed = [&](int i, int j) { return blocks.listed(i, j); };
    const Kept kept = [&](int i, int j) { return blocks.listed(i, j) && other(i, j); };
    const Kept certain = [&](int i, int j) { return blocks.whole(i, j) && inside(p)(i, j); };
    if (p.seqlen_q > 0) {
      const Span rows = {p.seqlen_q - 1, p.seqlen_q}, gap = read_keys(mask, rows).gap;
      const Span of_others = key_gap(mask.b.others, rows);
      ASSERT_EQ(std::pair(gap.begin, gap.end), std::pair(of_others.begin, of_others.end));
    }
    for (const auto& [tile_m, tile_n] : {std::pair{8, 16}, std::pair{16, 48}, std::pair{40, 96}}) {
      check_both_ways(mask, p, tile_m, tile_n, kept, certain, {listed});
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Mask, ListsOfCausal) {
  check_listed<Causal<Align::bottom_right>>([](const Problem& p) { return causal(p, Align::bottom_right); });
}
TEST(Mask, ListsOfTwoMasks) {
  check_listed<Causal<Align::top_left>, SlidingWindowWithSinks<Align::bottom_right>>([](const Problem& p) {
    return both(causal(p, Align::top_left), window(p, Align::bottom_right, 40, 0, 20));
  });
}

// A cursor reads each block of a list once over a walk, however many blocks the walk visits.
TEST(Mask, CursorKeepsItsPlace) {
  const Problem p = problem(16, 512);
  std::mt19937 random(1);
  const RandomBlocks<16, 32> blocks(random, p, 1.0);
  const ProblemParams params = blocks.params();
  const BlockSparse<16, 32, false> mask(params, p);
  decltype(mask)::Cursor<Keys> cursor;
  for (int bound = 512; bound > 0; bound -= 32) {
    EXPECT_EQ(mask.previous(Keys{}, {0, 16}, bound, cursor), bound - 1);
    EXPECT_EQ(cursor.end, bound / 32);
  }
}

// Unchecked lists: whatever they hold, a walk never reads out of bounds
// (sanitizers watch), it ends, and visited blocks lie in the sequence.
TEST(Mask, BlockListsOfAnything) {
  const unsigned seed = 20250611;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const Problem p = problem(100, 300);
  using Mask = Intersect<Bounds, BlockSparse<16, 64, false>>;
  for (int repeat = 0; repeat < 200; ++repeat) {
    const auto anything = [&] {
      return random() % 3 ? static_cast<int>(random() % 12) - 2 : static_cast<int>(random());
    };
    std::vector<int> offsets(8), blocks(9), bitmask_of(9);
    for (auto* table : {&offsets, &blocks, &bitmask_of})
      for (int& value : *table) value = anything();
    const std::vector<u32> bitmasks(3 * 16 * 2);
    ProblemParams params{};
    params.blocks = {offsets.data(), 0, 0, blocks.data(), bitmask_of.data(), bitmasks.data(), 7, 9, 3};
    const Mask mask(params, p);
    for (int first = 0; first < p.seqlen_q; first += 32) {
      const Span rows = {first, min(first + 32, p.seqlen_q)};
      int before = 5;
      for (const Visit& visit : walk<Keys>(mask, rows, 64, {0, unbounded})) {
        ASSERT_LT(visit.index, before);
        ASSERT_GE(visit.index, 0);
        before = visit.index;
        Mask::Tile tile = mask.tile<unknown_size, unknown_size>(visit.found);
        u32 words[2];
        for (int row = rows.begin; row < rows.end; ++row) tile.bits<64>(row, visit.index * 64, words);
      }
    }
  }
}

// A worked example with nine tokens, after a prefix that does not end at a word.
TEST(Mask, TreeOfNine) {
  const int parents[] = {-1, 0, 1, 1, 2, 2, 3, 3, 4};
  u32 words[9] = {};
  for (int i = 0; i < 9; ++i) words[i] = (parents[i] < 0 ? 0 : words[parents[i]]) | 1u << i;
  ProblemParams params{};
  params.tree = {.words = words,
                 .batch_stride = 0,
                 .row_stride = 1,
                 .rows = 9,
                 .words_per_row = 1,
                 .prefix_lengths = nullptr};
  for (const int prefix : {0, 1, 15, 16, 17, 40}) {
    const Problem p = problem(9, prefix + 9);
    using Mask = Intersect<Bounds, Tree>;
    const Mask mask(params, p);
    const auto seen = [&](int row) {
      std::vector<int> keys;
      for (int key = prefix; key < prefix + 9; ++key)
        if (mask.keep(row, key)) keys.push_back(key - prefix);
      return keys;
    };
    EXPECT_EQ(seen(8), (std::vector<int>{0, 1, 2, 4, 8}));
    EXPECT_EQ(seen(7), (std::vector<int>{0, 1, 3, 7}));
    const Kept kept = [&](int i, int j) {
      return inside(p)(i, j) && (j < prefix || (words[i] >> (j - prefix) & 1));
    };
    // A walk only knows the hull, so it visits all new keys.
    const Kept certain = [&](int i, int j) { return inside(p)(i, j) && j < prefix; };
    for (const int size : {4, 16}) {
      check_both_ways(mask, p, size, size, kept, certain, {});
      if (HasFatalFailure()) return;
    }
  }
}

// More new keys than bits, fewer rows than queries, explicit prefixes: keys without a bit are not seen.
TEST(Mask, TreesThatDoNotFit) {
  const std::vector<u32> words(5 * 2, ~0u);
  for (const int prefix : {-7, 0, 30, 500}) {
    ProblemParams params{};
    params.tree = {.words = words.data(),
                   .batch_stride = 0,
                   .row_stride = 2,
                   .rows = 5,
                   .words_per_row = 2,
                   .prefix_lengths = &prefix};
    const Problem p = problem(8, 120);
    const Intersect<Bounds, Tree> mask(params, p);
    const int end = min(max(prefix, 0), 120);
    for (int row = 0; row < 8; ++row)
      for (int key = 0; key < 120; ++key)
        ASSERT_EQ(mask.keep(row, key), key < end || (row < 5 && key - end < 64)) << row << ", " << key;
  }
}

}  // namespace
}  // namespace flashjit::device
