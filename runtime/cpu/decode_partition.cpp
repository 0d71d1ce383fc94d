#include "runtime/cpu/decode_partition.hpp"

#include <algorithm>
#include <cmath>

#include "templates/shared/decode_layout.h"

namespace flashjit {
namespace {

using i64 = std::int64_t;

constexpr i64 least_keys_of_part = 512;
// If lengths differ, each thread gets about so many items.
constexpr i64 items_of_thread = 4;
constexpr double worthwhile_bytes = 1 << 17;  // of K and V: some 10 us
constexpr i64 most_partial_bytes = 1 << 26;

i64 ceil_of(i64 a, i64 b) {
  return (a + b - 1) / b;
}

struct KeyCounts {
  i64 longest = 0, total = 0;
};
KeyCounts key_counts_of(const device::DecodeParams& p) {
  if (!p.seqlens_k) return {.longest = p.seqlen_k, .total = i64{p.batch} * p.seqlen_k};
  KeyCounts counts;
  for (int b = 0; b < p.batch; ++b) {
    counts.longest = std::max<i64>(counts.longest, p.seqlens_k[b]);
    counts.total += p.seqlens_k[b];
  }
  return counts;
}

}  // namespace

DecodePartition decode_partition(const device::DecodeParams& p, const AttentionSpec& spec,
                                 const KernelConfig& config, int num_threads) {
  const int group = p.num_heads_q / p.num_heads_kv;
  const auto rows_of = [&](int positions) {
    return device::round_up(positions * group, device::decode_rows_at_once);
  };
  DecodePartition cut{};
  cut.positions_at_once = p.seqlen_q;
  while (rows_of(cut.positions_at_once) > config.block_m) --cut.positions_at_once;
  cut.heads_at_once = std::clamp(config.block_m / rows_of(cut.positions_at_once), 1, p.num_heads_kv);

  const KeyCounts counts = key_counts_of(p);
  const i64 most_parts = std::max<i64>(counts.longest / least_keys_of_part, 1);
  const auto tiles_of = [&](int heads) { return p.batch * ceil_of(p.num_heads_kv, heads); };
  // Heads of one walk read their keys' rows one after the other, as memory likes it; threads without work
  // cost more.
  while (num_threads > 1 && cut.heads_at_once > 1 &&
         static_cast<double>(tiles_of(cut.heads_at_once)) * static_cast<double>(most_parts) <
             static_cast<double>(items_of_thread * num_threads))
    cut.heads_at_once = (cut.heads_at_once + 1) / 2;
  cut.tiles = tiles_of(cut.heads_at_once);

  // Keys times tiles of an entry. Products of any sizes fit a double.
  const double all_keys =
      static_cast<double>(std::max<i64>(counts.total, 1)) * static_cast<double>(cut.tiles / p.batch);
  const double share = static_cast<double>(counts.longest * items_of_thread * num_threads) / all_keys;
  const i64 wanted = num_threads == 1 ? 1 : static_cast<i64>(std::ceil(share));
  cut.part_bytes = sizeof(float) * static_cast<std::size_t>(cut.heads_at_once) *
                   static_cast<std::size_t>(p.seqlen_q) * static_cast<std::size_t>(group) *
                   static_cast<std::size_t>(spec.head_dim_v + 2);
  const i64 affordable = most_partial_bytes / static_cast<i64>(cut.part_bytes) / std::max<i64>(cut.tiles, 1);
  cut.parts = static_cast<int>(std::clamp<i64>(std::min(wanted, affordable), 1, most_parts));

  const double bytes = static_cast<double>(counts.total) * p.num_heads_kv *
                       (spec.head_dim + spec.head_dim_v) * static_cast<double>(size_of(spec.dtype));
  const i64 items = cut.tiles * cut.parts;
  cut.pieces = num_threads == 1
                   ? 1
                   : std::max<i64>(static_cast<i64>(std::min(bytes / worthwhile_bytes, 1.0 * items)), 1);
  return cut;
}

}  // namespace flashjit
