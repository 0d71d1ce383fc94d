// How a decode on a CPU is cut into items, over lengths that differ.
#include "runtime/cpu/decode_partition.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "codegen/families/search_space.hpp"
#include "runtime/step_params.hpp"
#include "templates/shared/decode_layout.h"
#include "tests/support/planned_kernel.hpp"

namespace flashjit::decode_partition_test {
namespace {

using testing_support::PlannedWithoutCode;

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

AttentionSpec invariant_spec() {
  AttentionSpec spec{.op = Operation::decode, .head_dim = 128, .batch_invariant = true};
  return spec.validated();
}

// The steps of such a kernel.
const PlannedWithoutCode& kernel_of(const AttentionSpec& given) {
  static const AttentionSpec spec = given;
  static const Target target = Target::parse("x86-64-v3");
  static const KernelConfig chosen = heuristic_config(spec, target, {});
  static const PlannedWithoutCode kernel(spec, target, chosen, 1);
  return kernel;
}

// A launch's items, as the kernel takes them.
struct Items {
  Items(const device::DecodeParams& p, const DecodePartition& cut, const AttentionSpec& spec)
      : planned(add_step(kernel_of(spec).kernel(), launch, "flashjit_decode")) {
    set_decode_items(planned, p, {}, cut, spec);
    lend(true);
  }
  void lend(bool memory) {
    step = planned;
    if (!step.items.lend) return;
    lent.reset(memory ? std::aligned_alloc(64, (step.items.lent_bytes + 63) / 64 * 64) : nullptr);
    step.items.lend(step, lent.get());
  }

  Launch launch;
  StepLaunch& planned;
  StepLaunch step;
  std::unique_ptr<void, decltype([](void* memory) { std::free(memory); })> lent;
};

// Keys of each item: all keys of all tiles, each once, in parts that begin where they may.
std::vector<std::int64_t> keys_of_items(Items& items, const std::vector<int>& lengths, bool fixed_parts) {
  const auto& p = items.step.params_as<device::CpuDecodeParams>();
  std::vector<std::int64_t> keys;
  int batch = -1, head_tile = 0, end = 0;  // of the item before
  const auto expect_tile_done = [&] {
    if (batch >= 0) {
      EXPECT_EQ(end, lengths[static_cast<std::size_t>(batch)]);
    }
  };
  std::vector<bool> used_slots;
  for (std::int64_t i = 0; i < items.step.items.count; ++i) {
    const device::CpuDecodeItem item(p, i);
    const device::Span span = item.keys(p, lengths[static_cast<std::size_t>(item.batch)]);
    if (item.part == 0) {
      expect_tile_done();
      const bool next_entry = batch < 0 || head_tile == p.head_tiles() - 1;
      EXPECT_EQ(item.batch, next_entry ? batch + 1 : batch);
      EXPECT_EQ(item.head_tile, next_entry ? 0 : head_tile + 1);
      end = 0;
    } else {
      EXPECT_EQ(item.batch, batch);
      EXPECT_EQ(item.head_tile, head_tile);
    }
    EXPECT_EQ(span.begin, end);
    EXPECT_TRUE(item.parts == 1 || !span.empty());
    if (fixed_parts && item.parts > 1) {
      EXPECT_EQ(span.begin, item.part * device::cpu_fixed_part_keys);
      EXPECT_LE(span.size(), device::cpu_fixed_part_keys);
    }
    if (item.parts > 1) {
      const auto slot = static_cast<std::size_t>(item.slot + item.part);
      const auto end_of_slot =
          reinterpret_cast<std::byte*>(p.partials + (item.slot + item.part + 1) * p.slot_floats());
      EXPECT_LE(end_of_slot - static_cast<std::byte*>(items.lent.get()),
                static_cast<std::int64_t>(items.step.items.lent_bytes));
      if (slot >= used_slots.size()) used_slots.resize(slot + 1);
      EXPECT_FALSE(used_slots[slot]) << "two parts have a slot";
      used_slots[slot] = true;
    }
    keys.push_back(span.size());
    batch = item.batch;
    head_tile = item.head_tile;
    end = span.end;
  }
  expect_tile_done();
  EXPECT_EQ(batch, p.batch - 1);
  EXPECT_EQ(head_tile, p.head_tiles() - 1);
  return keys;
}

TEST(DecodePartition, FitsTheConfigAndCoversEveryKeyOnce) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto upto = [&](int most) { return std::uniform_int_distribution(1, most)(random); };
  for (int i = 0; i < 3000 && !HasFailure(); ++i) {
    const int group = upto(i % 4 ? 8 : 300), heads_kv = upto(16), threads = upto(i % 2 ? 4 : 200);
    std::vector<int> lengths(static_cast<std::size_t>(upto(i % 3 ? 4 : 70)));
    for (int& length : lengths) length = upto(i % 5 ? 3000 : 200000) - 1;
    const AttentionSpec spec = i % 2 ? decode_spec() : invariant_spec();
    const device::DecodeParams p = sizes(lengths, group * heads_kv, heads_kv, upto(i % 7 ? 4 : 64));
    const DecodePartition cut = decode_partition(p, spec, config, threads);
    ASSERT_GE(cut.heads_at_once, 1);
    ASSERT_LE(cut.heads_at_once, heads_kv);
    ASSERT_GE(cut.tile_rows, 1);
    ASSERT_LE(cut.tile_rows, p.seqlen_q * group);
    ASSERT_LE(device::round_up(cut.tile_rows, device::decode_rows_at_once) * cut.heads_at_once,
              config.block_m);
    ASSERT_EQ(cut.tiles, std::int64_t{p.batch} * ((heads_kv - 1) / cut.heads_at_once + 1));
    ASSERT_GE(cut.pieces, 1);
    ASSERT_LE(cut.pieces, cut.items);
    ASSERT_LE(cut.slots * static_cast<std::int64_t>(cut.part_bytes), 1 << 26);
    ASSERT_TRUE(cut.slots == 0 || cut.part_keys >= 512) << "parts are worth their merging";
    if (threads == 1) {
      ASSERT_EQ(cut.slots, 0);
      ASSERT_EQ(cut.pieces, 1);
    }
    Items items(p, cut, spec);
    EXPECT_EQ(items.step.items.count, cut.items);
    EXPECT_EQ(items.step.items.pieces, cut.pieces);
    keys_of_items(items, lengths, spec.batch_invariant);
    // The lengths of a prepared launch change.
    for (int& length : lengths) length = upto(p.seqlen_k + 1) - 1;
    items.lend(i % 11 != 0);
    keys_of_items(items, lengths, spec.batch_invariant);
  }
}

// Each thread takes the next item when it has none: with equal shares all end at about the same time.
TEST(DecodePartition, SharesAreEven) {
  std::mt19937 random(1);
  std::vector<int> many(256);
  for (int& length : many) length = std::uniform_int_distribution(100, 40000)(random);
  std::vector<int> one_long(64, 500);
  one_long[40] = 100000;
  for (const AttentionSpec& spec : {decode_spec(), invariant_spec()})
    for (const std::vector<int>& lengths :
         {one_long, many, {131072}, {3000, 20000, 3000, 3000, 3000, 3000}, std::vector(7, 20000)})
      for (const int threads : {2, 16, 64, 128}) {
        const device::DecodeParams p = sizes(lengths, 32, 8, 1);
        const DecodePartition cut = decode_partition(p, spec, config, threads);
        Items items(p, cut, spec);
        std::vector<std::int64_t> ends(static_cast<std::size_t>(threads));  // a heap; the soonest is first
        for (const std::int64_t keys : keys_of_items(items, lengths, spec.batch_invariant)) {
          std::pop_heap(ends.begin(), ends.end(), std::greater());
          ends.back() += keys * cut.heads_at_once;
          std::push_heap(ends.begin(), ends.end(), std::greater());
        }
        const double all = 8.0 * std::accumulate(lengths.begin(), lengths.end(), 0.0);
        const auto last = static_cast<double>(std::ranges::max(ends));
        EXPECT_LE(last, 1.35 * all / threads + 1024)
            << threads << " threads, " << lengths.size() << " sequences, the first of " << lengths.front();
        EXPECT_GE(cut.pieces, std::min<std::int64_t>(threads, cut.items));
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
  for (const AttentionSpec& spec : {decode_spec(), invariant_spec()})
    for (const int threads : {2, 8192}) {
      const DecodePartition cut = decode_partition(p, spec, config, threads);
      EXPECT_EQ(cut.slots, 0);
      EXPECT_GT(cut.tiles, std::int64_t{1} << 40);
      EXPECT_EQ(cut.items, cut.tiles);
      EXPECT_EQ(cut.pieces, cut.tiles);
    }
}

}  // namespace
}  // namespace flashjit::decode_partition_test
