// The mask walks of templates/shared/mask.h against brute force, in both directions.
#include "shared/mask.h"

#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "block_list_mask.h"

namespace flashjit::device {
namespace {

using Kept = std::function<bool(int row, int key)>;

struct Visit {
  int index;
  bool whole;
  bool operator==(const Visit&) const = default;
};

template <class Axis, class Mask>
std::vector<Visit> walk(const Mask& mask, Span across, int size, Span within) {
  BlockWalk<Axis, Mask> blocks(mask, across, size, within);
  std::vector<Visit> visits;
  for (Block block; blocks.next(block);) visits.push_back({block.index, block.whole});
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

// Predicates answer for any pair, outside the sequences too (false). `certain` implies `kept`: where it holds
// for all pairs of a block, and only there, the walk claims the block whole. Every mask of `masks` may
// justify a visit on its own: the interface allows a visit where each has something, though not at the same
// pair.
template <class Axis, class Mask>
void check_walk(const Mask& mask, Span across, int size, int blocks, Span share, const Kept& kept,
                const Kept& certain, const std::vector<Kept>& masks) {
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
    const typename Mask::Tile tile = mask.tile(rows, keys);
    for (int i = rows.begin; i < rows.end; ++i) {
      for (int j = keys.begin; j < keys.end; ++j) {
        ASSERT_EQ(mask.keep(i, j), kept(i, j)) << i << ", " << j;
        ASSERT_EQ(tile.keep(i, j), kept(i, j)) << i << ", " << j;
      }
    }
    ++at;
  }
  ASSERT_EQ(at, visits.size()) << "visits out of order, twice or outside the share";
}

// All tiles across the axis, and for each the whole walk and every share of it.
template <class Axis, class Mask>
void check_axis(const Mask& mask, int seqlen_across, int seqlen_along, int size_across, int size_along,
                const Kept& kept, const Kept& certain, const std::vector<Kept>& masks) {
  const int blocks = ceil_div(seqlen_along, size_along);
  for (int begin = 0; begin < seqlen_across; begin += size_across) {
    const Span across = {begin, min(begin + size_across, seqlen_across)};
    for (int first = 0; first <= blocks; ++first) {
      for (int last = first; last <= blocks; ++last) {
        check_walk<Axis>(mask, across, size_along, blocks, {first, last}, kept, certain, masks);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
    ASSERT_EQ((walk<Axis>(mask, across, size_along, {0, 0x7fffffff})),
              (walk<Axis>(mask, across, size_along, {0, blocks * size_along})));
  }
}

template <class Mask>
void check_both_ways(const Mask& mask, const Problem& p, int size_m, int size_n, const Kept& kept,
                     const Kept& certain, const std::vector<Kept>& masks) {
  SCOPED_TRACE("seqlen_q " + std::to_string(p.seqlen_q) + ", seqlen_k " + std::to_string(p.seqlen_k) +
               ", blocks " + std::to_string(size_m) + " x " + std::to_string(size_n));
  check_axis<Keys>(mask, p.seqlen_q, p.seqlen_k, size_m, size_n, kept, certain, masks);
  if (testing::Test::HasFatalFailure()) return;
  check_axis<Queries>(mask, p.seqlen_k, p.seqlen_q, size_n, size_m, kept, certain, masks);
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
      const Mask mask(ForwardParams{}, p);
      const Kept kept = make_kept(p);
      for (int row = 0; row < seqlen_q; ++row) {
        const Span hull = mask.hull(Keys{}, {row, row + 1});
        for (int key = 0; key < longest + 4; ++key)
          ASSERT_EQ(hull.contains(key), kept(row, key)) << row << ", " << key;
      }
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

// Lengths near the end of int: nothing overflows, and what is visited is what is due.
TEST(Mask, LongSequences) {
  const int long_q = 0x40000000, long_k = 0x7fffff00, size = 128;
  const Problem p = problem(long_q, long_k);
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  const Mask mask(ForwardParams{}, p);
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
            (std::vector<Visit>{{long_q / size - 1, false}}));
}

// Rows of a GQA group packed head by head within a position: a packed tile asks for the positions it covers.
TEST(Mask, PackedRows) {
  using Mask = Intersect<Bounds, Causal<Align::bottom_right>>;
  for (int group : {1, 2, 3, 8}) {
    for (int seqlen_q = 1; seqlen_q <= 9; ++seqlen_q) {
      for (int seqlen_k = 0; seqlen_k <= longest; ++seqlen_k) {
        const Problem p = problem(seqlen_q, seqlen_k);
        const Mask mask(ForwardParams{}, p);
        const Kept kept = causal(p, Align::bottom_right);
        const Kept packed_kept = [&](int row, int key) { return kept(row / group, key); };
        const int packed_rows = seqlen_q * group, size_m = 4, size_n = 3;
        for (int begin = 0; begin < packed_rows; begin += size_m) {
          const Span packed = {begin, min(begin + size_m, packed_rows)};
          const Span across = {packed.begin / group, ceil_div(packed.end, group)};
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

// Random blocks: none, all of their pairs, or some.
template <int size_m, int size_n>
class RandomBlocks {
 public:
  RandomBlocks(std::mt19937& random, const Problem& p, double density)
      : row_blocks_(ceil_div(p.seqlen_q, size_m)), key_blocks_(ceil_div(p.seqlen_k, size_n)) {
    std::bernoulli_distribution listed(density), partial(0.4), bit(0.5);
    table_.assign(row_blocks_ * key_blocks_, nowhere);
    for (int& at : table_) {
      if (!listed(random)) continue;
      at = everywhere;
      if (!partial(random)) continue;
      at = static_cast<int>(bits_.size());
      for (int i = 0; i < size_m * size_n; ++i) bits_.push_back(bit(random));
    }
    of_rows_ = lists(row_blocks_, key_blocks_, [&](int i, int j) { return table_[i * key_blocks_ + j]; });
    of_keys_ = lists(key_blocks_, row_blocks_, [&](int i, int j) { return table_[j * key_blocks_ + i]; });
  }

  BlockListView view() const { return {compressed(of_rows_), compressed(of_keys_), bits_.data()}; }
  bool listed(int row, int key) const {
    const int m = row / size_m, n = key / size_n;
    return m < row_blocks_ && n < key_blocks_ && table_[m * key_blocks_ + n] != nowhere;
  }
  bool full(int row, int key) const {
    return listed(row, key) && table_[row / size_m * key_blocks_ + key / size_n] == everywhere;
  }
  bool kept(int row, int key) const {
    if (!listed(row, key)) return false;
    const int at = table_[row / size_m * key_blocks_ + key / size_n];
    return at == everywhere || bits_[at + row % size_m * size_n + key % size_n] != 0;
  }

 private:
  static constexpr int nowhere = BlockList<size_m, size_n>::nowhere,
                       everywhere = BlockList<size_m, size_n>::everywhere;

  struct Lists {
    std::vector<int> begin, block, bits;
  };
  static BlockLists compressed(const Lists& l) { return {l.begin.data(), l.block.data(), l.bits.data()}; }
  template <class At>
  static Lists lists(int count, int along, At at) {
    Lists l{.begin = {0}, .block = {}, .bits = {}};
    for (int i = 0; i < count; ++i) {
      for (int j = 0; j < along; ++j) {
        if (at(i, j) == nowhere) continue;
        l.block.push_back(j);
        l.bits.push_back(at(i, j));
      }
      l.begin.push_back(static_cast<int>(l.block.size()));
    }
    return l;
  }

  int row_blocks_, key_blocks_;
  std::vector<int> table_;
  std::vector<unsigned char> bits_;
  Lists of_rows_, of_keys_;
};

// Tiles smaller than, equal to and larger than the listed blocks, so that a walk covers part of a list, one,
// a few that its cursor remembers, and more than that.
template <class... Causals, class MakeKept>
void check_block_lists(MakeKept make_kept) {
  constexpr int size_m = 4, size_n = 2;
  using List = BlockList<size_m, size_n>;
  using Mask = Intersect<Bounds, List, Causals...>;
  static_assert(!Mask::row_intervals);
  const unsigned seed = 20240917;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 60; ++repeat) {
    const Problem p = problem(random() % 24, random() % 16);
    const RandomBlocks<size_m, size_n> blocks(random, p, (random() % 5) / 4.0);
    const BlockListParams params = {{blocks.view(), {}}};
    const Mask mask(params, p);
    const Kept interval = make_kept(p);
    const Kept listed = [&](int i, int j) { return blocks.listed(i, j); };
    const Kept kept = [&](int i, int j) { return interval(i, j) && blocks.kept(i, j); };
    const Kept certain = [&](int i, int j) { return interval(i, j) && blocks.full(i, j); };
    for (int tile_m : {2, 4, 8, 16}) {
      for (int tile_n : {1, 2, 6}) {
        check_both_ways(mask, p, tile_m, tile_n, kept, certain, {interval, listed});
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(Mask, BlockList) {
  check_block_lists<>(inside);
}
TEST(Mask, BlockListAndCausalBottomRight) {
  check_block_lists<Causal<Align::bottom_right>>(
      [](const Problem& p) { return causal(p, Align::bottom_right); });
}
TEST(Mask, BlockListAndCausalTopLeft) {
  check_block_lists<Causal<Align::top_left>>([](const Problem& p) { return causal(p, Align::top_left); });
}

// Lists of different block sizes: neither's hull says what the other skips.
TEST(Mask, TwoBlockLists) {
  using Mask = Intersect<Bounds, BlockList<4, 2, 0>, BlockList<2, 6, 1>>;
  const unsigned seed = 20250302;
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 60; ++repeat) {
    const Problem p = problem(random() % 24, random() % 30);
    const RandomBlocks<4, 2> a(random, p, 0.4);
    const RandomBlocks<2, 6> b(random, p, 0.4);
    const BlockListParams params = {{a.view(), b.view()}};
    const Mask mask(params, p);
    const Kept kept = [&](int i, int j) { return a.kept(i, j) && b.kept(i, j) && inside(p)(i, j); };
    const Kept certain = [&](int i, int j) { return a.full(i, j) && b.full(i, j) && inside(p)(i, j); };
    const Kept in_a = [&](int i, int j) { return a.listed(i, j); };
    const Kept in_b = [&](int i, int j) { return b.listed(i, j); };
    for (int size : {2, 4, 12}) {
      check_both_ways(mask, p, size, size, kept, certain, {in_a, in_b});
      if (HasFatalFailure()) return;
    }
  }
}

// A cursor reads each list entry once over a walk, however many blocks the walk visits.
TEST(Mask, CursorKeepsItsPlace) {
  const Problem p = problem(4, 32);
  std::mt19937 random(1);
  const RandomBlocks<4, 2> blocks(random, p, 1.0);
  const BlockListParams params = {{blocks.view(), {}}};
  const BlockList<4, 2> mask(params, p);
  BlockList<4, 2>::Cursor<Keys> cursor;
  for (int bound = 32; bound > 0; bound -= 2) {
    EXPECT_EQ(mask.previous(Keys{}, {0, 4}, bound, cursor), bound - 1);
    EXPECT_EQ(cursor.remaining[0], bound / 2);
  }
}

}  // namespace
}  // namespace flashjit::device
