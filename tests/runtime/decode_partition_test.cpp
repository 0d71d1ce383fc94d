// How a decode on a CPU is cut into items, over lengths that differ.
#include "runtime/cpu/decode_partition.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "templates/shared/decode_layout.h"

namespace flashjit::decode_partition_test {
namespace {

constexpr KernelConfig config{.block_m = 64, .block_n = 64, .num_stages = 1, .num_warps = 1};

device::DecodeParams sizes(const std::vector<int>& lengths, int heads_q, int heads_kv, int seqlen_q) {
  device::DecodeParams params{};
  params.batch = static_cast<int>(lengths.size());
  params.num_heads_q = heads_q;
  params.num_heads_kv = heads_kv;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = *std::max_element(lengths.begin(), lengths.end());
  params.seqlens_k = lengths.data();
  return params;
}

AttentionSpec decode_spec() {
  AttentionSpec spec{.op = Operation::decode, .head_dim = 128};
  return spec.validated();
}

TEST(DecodePartition, FitsTheConfigAndCoversEveryHead) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto upto = [&](int most) { return std::uniform_int_distribution(1, most)(random); };
  for (int i = 0; i < 5000; ++i) {
    const int group = upto(i % 4 ? 8 : 64), heads_kv = upto(16), threads = upto(i % 2 ? 4 : 200);
    std::vector<int> lengths(static_cast<std::size_t>(upto(i % 3 ? 4 : 70)));
    for (int& length : lengths) length = upto(i % 5 ? 3000 : 200000) - 1;
    const device::DecodeParams p = sizes(lengths, group * heads_kv, heads_kv, upto(i % 7 ? 4 : 64));
    const DecodePartition cut = decode_partition(p, decode_spec(), config, threads);
    ASSERT_GE(cut.heads_at_once, 1);
    ASSERT_LE(cut.heads_at_once, heads_kv);
    ASSERT_GE(cut.positions_at_once, 1);
    ASSERT_LE(cut.positions_at_once, p.seqlen_q);
    const int rows = device::round_up(cut.positions_at_once * group, device::decode_rows_at_once);
    ASSERT_LE(rows * cut.heads_at_once, config.block_m);
    ASSERT_EQ(cut.tiles, std::int64_t{p.batch} * ((heads_kv - 1) / cut.heads_at_once + 1));
    ASSERT_GE(cut.parts, 1);
    ASSERT_LE(cut.parts, std::max(1, p.seqlen_k / 512)) << "parts are worth their merging";
    ASSERT_GE(cut.pieces, 1);
    ASSERT_LE(cut.pieces, cut.tiles * cut.parts);
    if (threads == 1) {
      ASSERT_EQ(cut.parts, 1);
      ASSERT_EQ(cut.pieces, 1);
    }
  }
}

// No item is longer than a thread's share of all keys, so that no thread works alone at the end.
TEST(DecodePartition, OneLongSequenceAmongShortOnesIsSharedOut) {
  for (const int threads : {2, 16, 64})
    for (const auto& [long_one, others, short_ones] :
         {std::tuple{100000, 63, 500}, {131072, 0, 0}, {20000, 7, 3000}}) {
      std::vector<int> lengths(static_cast<std::size_t>(others) + 1, short_ones);
      lengths.front() = long_one;
      const DecodePartition cut = decode_partition(sizes(lengths, 32, 8, 1), decode_spec(), config, threads);
      const double all = 8.0 * std::accumulate(lengths.begin(), lengths.end(), 0.0);
      const double longest = static_cast<double>(cut.heads_at_once) * long_one / cut.parts;
      EXPECT_LE(longest, all / threads) << threads << " threads, " << long_one << " keys";
      EXPECT_GE(cut.pieces, std::min<std::int64_t>(threads, cut.tiles * cut.parts));
    }
}

// Sizes without memory behind them.
TEST(DecodePartition, SizesOfAnyMagnitude) {
  const std::vector<int> one = {1};
  device::DecodeParams p = sizes(one, 64, 64, 1);
  p.seqlens_k = nullptr;
  p.batch = 1 << 30;
  p.seqlen_k = 1 << 30;
  p.num_heads_kv = p.num_heads_q = 1 << 17;
  const DecodePartition cut = decode_partition(p, decode_spec(), config, 8192);
  EXPECT_EQ(cut.parts, 1);
  EXPECT_GT(cut.tiles, std::int64_t{1} << 40);
  EXPECT_EQ(cut.pieces, cut.tiles);
}

}  // namespace
}  // namespace flashjit::decode_partition_test
