#include "runtime/cpu/decode_partition.hpp"
#include "runtime/cpu/partition.hpp"
#include "runtime/step_params.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "templates/shared/decode_layout.h"

namespace flashjit {
namespace {

using i64 = std::int64_t;

constexpr i64 least_keys_of_part = 512;
// Each thread gets about so many items, if the keys suffice.
constexpr i64 items_of_thread = 4;
constexpr i64 most_partial_bytes = 1 << 26;
constexpr i64 most_items = i64{1} << 52;  // that are counted

i64 ceil_of(i64 a, i64 b) {
  return (a + b - 1) / b;
}

i64 length_of(const device::DecodeParams& p, int batch) {
  return p.seqlens_k ? std::clamp(p.seqlens_k[batch], 0, p.seqlen_k) : p.seqlen_k;
}

// The smaller of `most` and the product of numbers below 2^52.
i64 product_up_to(i64 most, i64 a, i64 b, i64 c) {
  const double product = static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
  return product < static_cast<double>(most) ? a * b * c : most;
}

struct KeyCounts {
  i64 longest = 0, total = 0;
};
KeyCounts key_counts_of(const device::DecodeParams& p) {
  if (!p.seqlens_k) return {.longest = p.seqlen_k, .total = i64{p.batch} * p.seqlen_k};
  KeyCounts counts;
  for (int b = 0; b < p.batch; ++b) {
    counts.longest = std::max(counts.longest, length_of(p, b));
    counts.total += length_of(p, b);
  }
  return counts;
}

// How tiles become items.
struct Cut {
  i64 part_keys, whole_keys;
  bool fixed_parts;

  // Fewer parts, if there are any.
  void lengthen(i64 most) {
    whole_keys = std::min(2 * whole_keys, most);
    if (!fixed_parts) part_keys = whole_keys;
  }
};

// The items of the lengths, and the slots for their parts.
device::CpuDecodeEntry count_items(const device::DecodeParams& p, i64 head_tiles, const Cut& cut,
                                   device::CpuDecodeEntry* entries = nullptr) {
  device::CpuDecodeEntry counted{};
  const auto count = [&](i64 length, i64 times) {
    const i64 parts = length <= cut.whole_keys ? 1 : ceil_of(length, cut.part_keys);
    const i64 items = product_up_to(most_items, times, head_tiles, parts);
    counted.item += items;
    if (parts > 1) counted.slot += items;
  };
  if (!p.seqlens_k && !entries) {
    count(p.seqlen_k, p.batch);
    return counted;
  }
  for (int b = 0; b < p.batch; ++b) {
    if (entries) entries[b] = counted;
    count(length_of(p, b), 1);
  }
  if (entries) entries[p.batch] = counted;
  return counted;
}

// The lent memory: counters of tiles, entries, slots.
struct LentLayout {
  std::size_t entries, partials;
  LentLayout(i64 tiles, int batch) {
    const auto after = [](std::size_t begin, std::size_t size) { return (begin + size + 63) / 64 * 64; };
    entries = after(0, sizeof(device::u32) * static_cast<std::size_t>(tiles));
    partials = after(entries, sizeof(device::CpuDecodeEntry) * (static_cast<std::size_t>(batch) + 1));
  }
};

// Counts the items of the lengths that hold now. If their parts need more slots than there are, there are
// fewer parts. Without memory each tile is one item.
void lend(StepLaunch& step, void* memory, bool fixed_parts) {
  auto& p = step.params_as<device::CpuDecodeParams>();
  const i64 head_tiles = p.head_tiles(), tiles = p.batch * head_tiles;
  auto* const bytes = static_cast<std::byte*>(memory);
  device::CpuDecodeEntry counted{.item = tiles, .slot = 0};
  if (memory != nullptr) {
    const LentLayout layout(tiles, p.batch);
    const i64 slots = static_cast<i64>((step.items.lent_bytes - layout.partials) /
                                       (sizeof(float) * static_cast<std::size_t>(p.slot_floats())));
    auto* const entries = reinterpret_cast<device::CpuDecodeEntry*>(bytes + layout.entries);
    Cut cut{.part_keys = p.part_keys, .whole_keys = p.whole_keys, .fixed_parts = fixed_parts};
    while (counted = count_items(p, head_tiles, cut, entries), counted.slot > slots) cut.lengthen(p.seqlen_k);
    p.part_keys = static_cast<int>(cut.part_keys);
    std::memset(memory, 0, sizeof(device::u32) * static_cast<std::size_t>(tiles));
    p.arrived = reinterpret_cast<device::u32*>(bytes);
    p.entries = entries;
    p.partials = reinterpret_cast<float*>(bytes + layout.partials);
  }
  step.items.count = counted.item;
  step.items.pieces = std::min(step.items.pieces, step.items.count);
}

}  // namespace

DecodePartition decode_partition(const device::DecodeParams& p, const AttentionSpec& spec,
                                 const KernelConfig& config, int num_threads) {
  const int group = p.num_heads_q / p.num_heads_kv;
  const auto padded = [](i64 rows) {
    return ceil_of(rows, device::decode_rows_at_once) * device::decode_rows_at_once;
  };
  DecodePartition cut{};
  i64 positions = p.seqlen_q;
  while (positions > 0 && padded(positions * group) > config.block_m) --positions;
  cut.tile_rows = positions > 0 ? static_cast<int>(positions) * group : config.block_m;
  cut.heads_at_once = std::clamp(static_cast<int>(config.block_m / padded(cut.tile_rows)), 1, p.num_heads_kv);

  const KeyCounts counts = key_counts_of(p);
  const i64 least_keys = spec.batch_invariant ? device::cpu_fixed_part_keys : least_keys_of_part;
  const auto head_tiles_of = [&](int heads) { return ceil_of(p.num_heads_kv, heads); };
  const auto items_of = [&](int heads, const Cut& way) { return count_items(p, head_tiles_of(heads), way); };
  // Heads of one walk read their keys' rows one after the other, as memory likes it; threads without work
  // cost more.
  const Cut finest{.part_keys = least_keys, .whole_keys = least_keys, .fixed_parts = spec.batch_invariant};
  while (num_threads > 1 && cut.heads_at_once > 1 &&
         items_of(cut.heads_at_once, finest).item < items_of_thread * num_threads)
    cut.heads_at_once = (cut.heads_at_once + 1) / 2;
  const i64 head_tiles = head_tiles_of(cut.heads_at_once);
  cut.tiles = p.batch * head_tiles;
  cut.part_bytes = sizeof(float) * static_cast<std::size_t>(cut.heads_at_once) *
                   static_cast<std::size_t>(p.seqlen_q) * static_cast<std::size_t>(group) *
                   static_cast<std::size_t>(spec.head_dim_v + 2);

  const i64 most_slots = most_partial_bytes / static_cast<i64>(cut.part_bytes);
  const i64 most_keys = std::max<i64>(counts.longest, 1);
  // Keys times tiles of an entry. Products of any sizes fit a double.
  const double share = static_cast<double>(counts.total) * static_cast<double>(head_tiles) /
                       static_cast<double>(items_of_thread * num_threads);
  const i64 wanted =
      num_threads == 1
          ? most_keys
          : std::max(static_cast<i64>(std::ceil(std::min(share, static_cast<double>(most_keys)))),
                     least_keys);
  Cut way = finest;
  way.whole_keys = ceil_of(wanted, config.block_n) * config.block_n;
  if (!way.fixed_parts) way.part_keys = way.whole_keys;
  device::CpuDecodeEntry counted;
  while (counted = count_items(p, head_tiles, way), counted.slot > most_slots)
    way.lengthen(p.seqlen_k);  // not most_keys: another thread may write longer lengths meanwhile
  cut.part_keys = static_cast<int>(std::min(way.part_keys, most_keys));
  cut.whole_keys = static_cast<int>(std::min(way.whole_keys, most_keys));
  cut.items = counted.item;
  cut.slots = counted.slot;

  const double bytes = static_cast<double>(counts.total) * p.num_heads_kv *
                       (spec.head_dim + spec.head_dim_v) * static_cast<double>(size_of(spec.dtype));
  cut.pieces =
      num_threads == 1
          ? 1
          : std::max<i64>(
                static_cast<i64>(std::min(bytes / worthwhile_bytes, static_cast<double>(cut.items))), 1);
  return cut;
}

void set_decode_items(StepLaunch& step, const device::DecodeParams& params, const AddedParams& added,
                      const DecodePartition& cut, const AttentionSpec& spec) {
  auto& p = make_params<device::CpuDecodeParams>(step, params, added);
  p.heads_at_once = cut.heads_at_once;
  p.tile_rows = cut.tile_rows;
  p.part_keys = cut.part_keys;
  p.whole_keys = cut.whole_keys;
  p.head_floats = i64{params.seqlen_q} * (params.num_heads_q / params.num_heads_kv) * (spec.head_dim_v + 2);
  Items& items = step.items;
  items.count = cut.items;
  items.pieces = cut.pieces;
  if (cut.slots == 0) return;
  // A power of two: lengths decide how many parts there are, and threads' memory seldom grows.
  items.lent_bytes = std::bit_ceil(LentLayout(cut.tiles, params.batch).partials +
                                   static_cast<std::size_t>(cut.slots) * cut.part_bytes);
  items.lend = spec.batch_invariant ? [](StepLaunch& lent, void* memory) { lend(lent, memory, true); }
                                    : [](StepLaunch& lent, void* memory) { lend(lent, memory, false); };
}

}  // namespace flashjit
