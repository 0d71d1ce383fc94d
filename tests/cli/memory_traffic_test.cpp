// The model of `flashjit audit`, held to counts by hand. A row of 16 floats is a line.
#include "tools/command/memory_traffic.hpp"

#include <gtest/gtest.h>

namespace flashjit::command {
namespace {

constexpr std::int64_t line = CacheModel::line, large = 1 << 20;

TEST(CacheModel, ReplacesWhatWasUsedLongestAgo) {
  CacheModel cache(2 * line, 10 * line);
  cache.read(0 * line, line);
  cache.read(1 * line + 4, 8);
  cache.read(0 * line, line);
  cache.write(2 * line, line);  // instead of 1
  cache.read(1 * line, line);   // instead of 0
  EXPECT_EQ(cache.bytes_read(), 3 * line);
  EXPECT_EQ(cache.bytes_written(), 0);
  cache.update(3 * line + 60, 8);  // 3 and 4, instead of 2, which was written, and of 1
  EXPECT_EQ(cache.bytes_read(), 5 * line);
  EXPECT_EQ(cache.bytes_written(), 1 * line);
  cache.write_back(0, 4 * line);
  cache.write_back(0, 4 * line);
  EXPECT_EQ(cache.bytes_written(), 2 * line);
  cache.read(0, 2 * line);  // instead of 3, which is written already, and of 4
  EXPECT_EQ(cache.bytes_written(), 3 * line);
}

class ForwardTraffic : public ::testing::Test {
 protected:
  // Reads and writes in lines, of a cache of a line, of a large one, and the least possible.
  void expect(std::vector<std::pair<int, int>> lines, const SeesBlock& sees) {
    const std::vector<MovedBytes> traffic = forward_traffic(spec, shape, walk, sees, {line, large});
    ASSERT_EQ(traffic.size(), lines.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(traffic[i].read, lines[i].first * line) << i;
      EXPECT_EQ(traffic[i].written, lines[i].second * line) << i;
    }
  }
  static bool all(int, int, int, int, int) { return true; }

  AttentionSpec spec{.dtype = DType::fp32, .head_dim = 16, .head_dim_v = 16};
  Shape shape{.batch = 1, .seqlen_q = 4, .seqlen_k = 4, .num_heads_q = 1, .num_heads_kv = 1};
  ForwardWalk walk{
      .tile_rows = 2, .packed_heads = 1, .block_n = 2, .packed_blocks = 0, .packed_block = 0, .scratch = 0};
};

// Each of two tiles reads its 2 rows of Q and all 4 of K and V. Each row writes O and the line of lse, which
// is replaced after each row.
TEST_F(ForwardTraffic, EachTileReadsItsKeys) {
  expect({{2 * (2 + 8), 4 + 4}, {12, 5}, {12, 5}}, all);
}

// The first tile sees the first block alone.
TEST_F(ForwardTraffic, SkippedBlocksAreNotRead) {
  expect({{2 + 8 + 2 + 4, 4 + 4}, {12, 5}, {12, 5}},
         [this](int, int, int first, int rows, int block) { return block * walk.block_n < first + rows; });
  // The last keys are nobody's.
  expect({{2 * (2 + 4), 4 + 4}, {4 + 4, 5}, {4 + 4, 5}},
         [](int, int, int, int, int block) { return block == 0; });
}

// Each of two blocks is read once, written packed in 4 lines, and read by both tiles.
TEST_F(ForwardTraffic, PackedBlocksStay) {
  walk.packed_blocks = 2;
  walk.packed_block = 4 * line;
  expect({{2 * 2 + 8 + 2 * 8, 4 + 4 + 8}, {12, 5}, {12, 5}}, all);
  // There is room for one: every tile packs both.
  walk.packed_blocks = 1;
  expect({{2 * (2 + 8 + 8), 4 + 4 + 16}, {12, 5}, {12, 5}}, all);
}

// A tile and a block: 2 lines of scratch are written, read and written with the block, and read at the end.
TEST_F(ForwardTraffic, ScratchTakesPlaces) {
  walk.tile_rows = walk.block_n = 4;
  walk.scratch = 2 * line;
  expect({{4 + 8 + 2 + 2, 2 + 2 + 4 + 4}, {12, 5}, {12, 5}}, all);
}

// Four rows of two heads: the head's keys are read for each, or once where the heads share tiles.
TEST_F(ForwardTraffic, HeadsShareKeys) {
  spec.lse = false;
  shape.seqlen_q = 2, shape.num_heads_q = 2;
  expect({{2 * (2 + 8), 4}, {4 + 8, 4}, {4 + 8, 4}}, all);
  walk.packed_heads = 2, walk.tile_rows = 4;
  expect({{4 + 8, 4}, {4 + 8, 4}, {4 + 8, 4}}, all);
}

TEST_F(ForwardTraffic, ValuesInKeysAreReadWithThem) {
  spec.v_in_k = true;
  expect({{2 * (2 + 4), 4 + 4}, {8, 5}, {8, 5}}, all);
}

class BackwardTraffic : public ForwardTraffic {
 protected:
  void expect_backward(std::vector<std::pair<int, int>> lines, const SeesBlock& sees) {
    const std::vector<MovedBytes> traffic = backward_traffic(spec, shape, backward, sees, {line, large});
    ASSERT_EQ(traffic.size(), lines.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(traffic[i].read, lines[i].first * line) << i;
      EXPECT_EQ(traffic[i].written, lines[i].second * line) << i;
    }
  }
  BackwardWalk backward{.unit_rows = 2, .block_n = 2, .scratch = 0, .dq_row = line};
};

// Through a cache of one line. Rows: 4 of O, dO and of the line of lse are read, and 3 numbers are written,
// whose lines replace each other. Sums are cleared: 4. Each of two blocks reads 2 rows of K and of V; each of
// two units reads 2 rows of Q, dO and of 3 numbers, and reads and writes 2 sums; 2 rows of dK and of dV are
// written. At last each sum is read, and a row of dQ is written.
// Through a large one each tensor comes once: Q, K, V, O and dO, and lse; dQ, dK and dV.
TEST_F(BackwardTraffic, EachBlockReadsItsRows) {
  const int of_unit = 2 * (2 + 3) + 2;
  expect_backward({{4 * 3 + 2 * (4 + 2 * of_unit) + 4, 4 * 3 + 4 + 2 * (2 * 2 + 4) + 4}, {21, 12}, {21, 12}},
                  all);
}

// The first unit sees the first block alone: it reads and writes less, but all of dK and dV are written.
TEST_F(BackwardTraffic, SkippedUnitsAreNotRead) {
  const int of_unit = 2 * (2 + 3) + 2;
  expect_backward(
      {{4 * 3 + 2 * 4 + 3 * of_unit + 4, 4 * 3 + 4 + 3 * 2 + 2 * 4 + 4}, {21, 12}, {21, 12}},
      [this](int, int, int first, int rows, int block) { return block * backward.block_n < first + rows; });
}

// A block and a unit: 2 lines of scratch are written at the block's begin, read and written with the unit,
// and read at its end.
TEST_F(BackwardTraffic, ScratchTakesPlaces) {
  backward.unit_rows = backward.block_n = 4;
  backward.scratch = 2 * line;
  expect_backward(
      {{4 * 3 + 8 + 4 * (2 + 3) + 4 + 2 + 2 + 4, 4 * 3 + 4 + 2 + 2 + 4 + 8 + 4}, {21, 12}, {21, 12}}, all);
}

// Two query heads share keys, which are read once, and dK and dV, which are written once.
TEST_F(BackwardTraffic, HeadsShareKeys) {
  shape.seqlen_q = 2, shape.num_heads_q = 2;
  backward.block_n = 4;
  const int of_unit = 2 * (2 + 3) + 2;
  expect_backward({{4 * 3 + 8 + 2 * of_unit + 4, 4 * 3 + 4 + 2 * 2 + 8 + 4}, {21, 12}, {21, 12}}, all);
}

}  // namespace
}  // namespace flashjit::command
