#include "runtime/cpu/partition.hpp"

#include <algorithm>

#include "codegen/families/cpu_products.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {
namespace {

using i64 = std::int64_t;

// The functions of templates/shared/platform.h, for lengths of 64 bits.
constexpr i64 ceil_div(i64 a, i64 b) {
  return (a + b - 1) / b;
}
constexpr i64 round_up(i64 a, i64 b) {
  return ceil_div(a, b) * b;
}

// Costs of a tile, measured with vectors, estimated for AMX. conversion_rows: converting K
// and V costs as much as computing so many more rows. merge_keys: writing and adding up a
// part's output costs as much as computing so many more keys. worthwhile_flops: the
// operations of some 10 us; a thread with less work would take longer to wake than to work.
// Few rows convert nothing, and reading K and V bounds them.
struct Costs {
  int conversion_rows, merge_keys;
  double worthwhile_flops;
};
constexpr Costs of_vectors = {10, 8, 1e6}, of_amx = {40, 32, 1e7}, of_few_rows = {0, 8, 1e6};

constexpr int most_parts = 64;

constexpr int most_heads_in_turns = 8;

// The most query heads that share a tile: positions of their rows are ints, up to a list's end.
constexpr int most_packed_heads = 1 << 16;

// The rows of a tile of block lists with AMX whose packed blocks stay packed,
// measured. Large tiles convert fewer blocks; small tiles find more of their
// Q and O in near caches, which matters more once blocks stay packed.
constexpr int rows_near = 128;

// Tiles have whole lists of rows if those fit.
int row_unit(const AttentionSpec& spec, int packed_heads, int block_m, int step) {
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  const int rows = blocks ? blocks->block_m * packed_heads : step;
  return rows <= block_m ? rows : step;
}

// All blocks of a head, if a thread has several tiles of the head and room for the blocks; otherwise one.
int packed_blocks(const device::ForwardParams& params, const AttentionSpec& spec, const Target& target,
                  const KernelConfig& config, const Partition& cut, i64 threads) {
  const i64 tiles_of_head = cut.tiles / params.batch / params.num_heads_kv;
  if (cut.key_parts > 1 || tiles_of_head < 2 * threads) return 1;
  const i64 blocks = std::max<i64>(1, ceil_div(params.seqlen_k, config.block_n));
  const bool fit = (blocks - 1) * cpu_packed_block(spec, target, config) <= packed_room;
  return fit ? static_cast<int>(blocks) : 1;
}

bool lists_per_head(const AttentionSpec& spec) {
  const auto* blocks = find_mask<BlockSparseMask>(spec.mask);
  return blocks && blocks->per_head;
}

}  // namespace

Partition partition(const device::ForwardParams& params, const AttentionSpec& spec, const Target& target,
                    const KernelConfig& config, int num_threads) {
  const int block_m = config.block_m, heads_per_kv_head = params.num_heads_q / params.num_heads_kv;
  const bool packs = heads_per_kv_head > 1 && heads_per_kv_head <= most_packed_heads &&
                     params.seqlen_q < block_m && !lists_per_head(spec);
  Partition best{.packed_heads = packs ? heads_per_kv_head : 1,
                 .tile_rows = 0,
                 .key_parts = 1,
                 .packed_blocks = 1,
                 .tiles = 0,
                 .pieces = 0};
  const i64 rows = i64{params.seqlen_q} * best.packed_heads;
  // Rows of a unit; every tile begins with a whole unit.
  const bool amx = uses_amx(spec, target);
  const int step = std::min(amx ? device::amx_unit : 16, block_m);
  const i64 bytes =
      i64{params.seqlen_k} * (spec.head_dim + spec.head_dim_v) * size_of(spec.kv_dtype.value_or(spec.dtype));
  const bool few = !spec.batch_invariant &&
                   rows <= device::cpu_few_rows(target.vector_bytes() / int{sizeof(float)}, bytes);
  const Costs& costs = few ? of_few_rows : amx ? of_amx : of_vectors;
  const i64 heads = i64{params.batch} * params.num_heads_q / best.packed_heads;
  const double flops = 2.0 * double(heads) *
                       double((few ? rows : round_up(rows, step)) + costs.conversion_rows) * params.seqlen_k *
                       (spec.head_dim + spec.head_dim_v);
  const double read = few ? double(heads) * double(bytes) : 0;
  // Shares that are worth a thread.
  const double shares = std::max(flops / costs.worthwhile_flops, read / worthwhile_bytes);
  const i64 threads = static_cast<i64>(std::clamp(shares, 1.0, double(num_threads)));

  // Looks for the shortest time, until each thread has several tiles. If all
  // tiles take equally long, the time is a whole number of rounds. If they
  // may differ, some thread may begin a tile when all other threads are done.
  const bool even = spec.mask.empty() && !spec.varlen && !spec.paged;
  const int unit = row_unit(spec, best.packed_heads, block_m, step), largest = block_m / unit * unit;
  const i64 key_blocks = std::max<i64>(1, ceil_div(params.seqlen_k, cpu_step(spec, target, config)));
  double least = 0;
  for (i64 tiles = ceil_div(rows, largest), tile_rows = 0;; tiles = ceil_div(rows, tile_rows - unit)) {
    tile_rows = round_up(ceil_div(rows, tiles), unit);
    tiles = ceil_div(rows, tile_rows);
    const i64 all = heads * tiles;
    const i64 useful = spec.batch_invariant ? 1
                                            : std::clamp<i64>(most_items_in_parts(threads) / all, 1,
                                                              std::min<i64>(key_blocks, most_parts));
    for (int parts = 1; parts <= useful; ++parts) {
      const double merging = parts > 1 ? double(tile_rows) * costs.merge_keys / params.seqlen_k : 0;
      const double one = double(tile_rows + costs.conversion_rows) / parts + merging;
      const i64 items = all * parts;
      const i64 rounds = (items - 1) / threads + 1;
      const double time = (even ? double(rounds) : double(items - 1) / double(threads) + 1) * one;
      if (best.tiles != 0 && time >= least) continue;
      least = time;
      best.tile_rows = static_cast<int>(tile_rows);
      best.key_parts = parts;
      best.tiles = all;
    }
    if (tile_rows == unit || all >= 4 * threads) break;
  }
  best.packed_blocks = packed_blocks(params, spec, target, config, best, threads);
  if (amx && find_mask<BlockSparseMask>(spec.mask)) {
    Partition near = best;
    near.tile_rows = std::min(best.tile_rows, std::max(rows_near / unit, 1) * unit);
    near.tiles = heads * ceil_div(rows, near.tile_rows);
    near.packed_blocks = packed_blocks(params, spec, target, config, near, threads);
    if (near.packed_blocks > 1) best = near;
  }
  // A thread takes several small items at once. Heads of few rows take turns at the keys, which memory likes.
  const i64 items = best.tiles * best.key_parts;
  const i64 together = few ? std::clamp<i64>(items / (2 * threads), 1, most_heads_in_turns) : 1;
  const i64 worthwhile = static_cast<i64>(std::min(shares, double(ceil_div(items, together))));
  best.pieces = threads == 1 ? 1 : std::min(items, std::max(threads, worthwhile));
  return best;
}

}  // namespace flashjit
