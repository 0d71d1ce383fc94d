#include "runtime/cuda/tile_plan.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "codegen/families/forward_kernels.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "runtime/cuda/tile_sections.hpp"
#include "templates/shared/tile_waves.h"

namespace flashjit::cuda {
namespace {

// Bytes of the L2 cache that a section's K and V may take. An H100 has 50 MB, and most of
// the other data that pass through leave K and V alone. An A100 has 40 MB in two halves.
constexpr std::int64_t l2_of_h100 = 32 << 20, l2_of_others = 16 << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

struct Tiles {
  std::int64_t heads, of_head;
  std::int64_t all() const { return heads * of_head; }
};

// Counts the tiles of `heads_q` heads per batch entry, each of `rows`
// positions. Throws invalid_argument if there are more than a grid takes.
Tiles count_tiles(const device::ForwardParams& p, int heads_q, int block_m, int rows) {
  const Tiles tiles = {std::int64_t{p.batch} * heads_q, ceil_div(p.seqlen_q, rows)};
  constexpr std::int64_t max_grid = std::numeric_limits<std::int32_t>::max();
  if (tiles.heads > max_grid / tiles.of_head) {
    throw Error(ErrorCode::invalid_argument,
                "batch " + std::to_string(p.batch) + " x num_heads_q " + std::to_string(heads_q) + " x " +
                    std::to_string(tiles.of_head) + " tiles of " + std::to_string(block_m) +
                    " query rows: a launch has at most 2147483647 blocks; split the batch");
  }
  return tiles;
}

TileSections sections_of(const AttentionSpec& spec, const device::ForwardParams& p, std::int64_t heads,
                         const Tiles& tiles, int heads_q, int parts, int multiprocessors,
                         std::int64_t cache_bytes, int early_tiles = 0) {
  const std::int64_t bytes_of_kv_head = std::int64_t{p.seqlen_k} * spec.cached_columns() * 2;
  const auto at_a_time = std::min<std::int64_t>(tiles.all(), multiprocessors);
  return tile_sections(static_cast<int>(heads), static_cast<int>(tiles.of_head), static_cast<int>(at_a_time),
                       bytes_of_kv_head / (heads_q / p.num_heads_kv) / parts, cache_bytes, early_tiles);
}

// The most blocks of keys that a tile has, by masks whose keys are an interval. Others keep all keys, as only
// the device knows better.
std::int64_t steps_of_longest(const AttentionSpec& spec, const KernelConfig& config,
                              const device::ForwardParams& p, std::int64_t tokens) {
  std::int64_t keys = p.seqlen_k;
  const auto* causal = spec.offsets ? nullptr : find_mask<CausalMask>(spec.mask);
  if (causal && causal->align == CausalAlign::top_left) keys = std::min<std::int64_t>(keys, p.seqlen_q);
  if (const auto* window = find_mask<SlidingWindowMask>(spec.mask); window && !window->sinks)
    keys = std::min(keys, tokens + p.window_left + (causal ? 0 : p.window_right));
  return ceil_div(std::max(keys, std::int64_t{1}), config.block_n);
}

// How many parts the keys of each tile have, all of which multiprocessors compute at the same time: an
// estimate in microseconds of an H100 (tests/bench/log/gpu_forward_sm90a.md). A multiprocessor multiplies
// 6 TFLOP/s. Parts take 3 us for a second step, and 0.25 us each to be written and read again, or 0.06 us
// where the second step reads many at once. It begins 8 us later if the first step leaves it no
// multiprocessor to wait on.
int parts_of_keys(const AttentionSpec& spec, const KernelConfig& config, std::int64_t steps,
                  std::int64_t tiles, int multiprocessors) {
  const double step = 2e-6 / 6 * config.block_m * config.block_n * (spec.head_dim + spec.head_dim_v);
  const double part = divides_by_length(spec) ? 0.06 : 0.25;
  int best = 1;
  double least = step * static_cast<double>(steps);
  for (int parts = 2; parts <= std::min(multiprocessors / tiles, steps); ++parts) {
    const double late = 10 * tiles * parts > 9 * std::int64_t{multiprocessors} ? 8 : 0;
    const double time = step * static_cast<double>(ceil_div(steps, parts)) + 3 + part * parts + late;
    if (time >= least) continue;
    least = time;
    best = parts;
  }
  return best;
}

// With fixed parts (shared/forward_sm90a_params.h): the most that a tile has of so many steps in a row, among
// `all` steps of the sequence.
int fixed_parts_of(const KernelConfig& config, std::int64_t steps, std::int64_t all) {
  const std::int64_t size = device::forward_part_blocks(config.block_n);
  return static_cast<int>(std::min(ceil_div(steps - 1, size) + 1, ceil_div(all, size)));
}
// How many of them a launch divides among blocks of the grid: all or none, by the estimate of
// parts_of_keys().
int divided_fixed_parts(const AttentionSpec& spec, const KernelConfig& config, std::int64_t steps,
                        std::int64_t all, std::int64_t tiles, int multiprocessors) {
  const int parts = fixed_parts_of(config, steps, all);
  const double step = 2e-6 / 6 * config.block_m * config.block_n * (spec.head_dim + spec.head_dim_v);
  const std::int64_t steps_of_part =
                         std::min<std::int64_t>(steps, device::forward_part_blocks(config.block_n)),
                     in_turn = ceil_div(tiles * parts, multiprocessors) * steps_of_part;
  const bool pays = step * static_cast<double>(steps - in_turn) > 3 + 0.25 * parts;
  return pays && tiles * parts <= device::most_forward_parts ? parts : 1;
}

}  // namespace

bool divides_fixed_parts(const AttentionSpec& spec) {
  return device::forward_has_fixed_parts(spec.batch_invariant, spec.head_dim, spec.head_dim_v);
}

PartsWorkspace::PartsWorkspace(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                               const Shape& shape) {
  std::int64_t parts = divides_by_length(spec) ? 2 * multiprocessors : multiprocessors;
  if (divides_fixed_parts(spec)) {
    const std::int64_t tiles = std::int64_t{shape.batch} * shape.num_heads_q *
                               ceil_div(std::max(shape.seqlen_q, 1), config.block_m),
                       steps = ceil_div(std::max(shape.seqlen_k, 1), config.block_n);
    const std::int64_t of_tile = fixed_parts_of(config, steps, steps);
    parts = of_tile == 1
                ? 0
                : std::min<std::int64_t>(std::min<std::int64_t>(tiles, multiprocessors / 2) * of_tile,
                                         device::most_forward_parts);
  }
  const auto rows = static_cast<std::size_t>(parts) * static_cast<std::size_t>(config.block_m);
  outputs = rows * static_cast<std::size_t>(spec.head_dim_v);
  states = rows * 2;
  bytes = sizeof(float) * (outputs + states);
  if (divides_by_length(spec)) bytes += sizeof(int) * 2 * static_cast<std::size_t>(multiprocessors);
}

int packed_heads(int heads_per_kv_head, int seqlen_q, int block_m) {
  const auto tiles = [&](int heads) {
    return heads_per_kv_head / heads * ceil_div(seqlen_q, block_m / heads);
  };
  const int most = std::min(heads_per_kv_head, block_m);
  std::int64_t fewest = tiles(1);
  for (int heads = 2; heads <= most; ++heads)
    if (heads_per_kv_head % heads == 0) fewest = std::min(fewest, tiles(heads));
  int heads = 1;
  while (heads_per_kv_head % heads != 0 || 16 * tiles(heads) > 17 * fewest) ++heads;
  return heads;
}

device::GatheredKeys pad_gathered(const KernelConfig& config, device::GatheredKeys gathered,
                                  device::ForwardParams& p) {
  gathered.pad = (config.block_n - gathered.keys % config.block_n) % config.block_n;
  p.seqlen_k += gathered.pad;
  return gathered;
}

Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                device::Sm80ForwardParams& p) {
  const Tiles tiles = count_tiles(p, p.num_heads_q, config.block_m, config.block_m);
  p.section_heads =
      sections_of(spec, p, tiles.heads, tiles, p.num_heads_q, 1, multiprocessors, l2_of_others).heads;
  return {static_cast<unsigned>(tiles.all())};
}

Grid plan_tiles(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors, void* workspace,
                device::Sm90aForwardParams& p, int parts, int early_rows) {
  p.packed_heads =
      config.pack_gqa ? packed_heads(p.num_heads_q / p.num_heads_kv, p.seqlen_q, config.block_m) : 1;
  p.packed_heads_inverse = static_cast<device::u32>(ceil_div(1 << 16, p.packed_heads));
  const int heads_q = p.num_heads_q / p.packed_heads;  // the heads that share a tile count as one
  const int tokens = config.block_m / p.packed_heads;
  Tiles tiles = count_tiles(p, heads_q, config.block_m, tokens);
  p.parts = 1;
  std::int64_t at_once = multiprocessors;
  const std::int64_t of_entry = tiles.all() / std::max(p.batch, 1);
  // Where only the device knows which sequences are long, any number of them is divided, if shares of a few
  // tiles leave few multiprocessors without any.
  const bool ragged = divides_by_length(spec) && (p.seqlens_k || p.cu_seqlens_k);
  if (workspace && (tiles.all() * 2 <= multiprocessors || (ragged && of_entry * 8 <= multiprocessors))) {
    const std::int64_t steps = steps_of_longest(spec, config, p, tokens);
    p.parts_o = static_cast<float*>(workspace);
    if (divides_fixed_parts(spec)) {
      const std::int64_t all = ceil_div(std::max(p.seqlen_k, 1), config.block_n);
      p.parts = parts > 0 ? fixed_parts_of(config, steps, all)
                          : divided_fixed_parts(spec, config, steps, all, tiles.all(), multiprocessors);
      tiles.heads *= p.parts;
      p.parts_state = p.parts_o + tiles.all() * config.block_m * spec.head_dim_v;
      // Every block has as many parts; the others leave multiprocessors to the merge.
      at_once = ceil_div(tiles.all(), ceil_div(tiles.all(), multiprocessors));
    } else {
      const PartsWorkspace places(spec, config, multiprocessors, {});
      p.parts_state = p.parts_o + places.outputs;
      if (divides_by_length(spec)) {
        // As many parts as pay for the longest sequence alone, if others leave it room.
        if (p.batch <= std::numeric_limits<std::int32_t>::max() / (steps + 2))
          p.parts = parts > 0 ? parts : parts_of_keys(spec, config, steps, of_entry, multiprocessors);
        p.part_blocks = static_cast<int>(ceil_div(steps, p.parts));
        // Where the grid takes every multiprocessor, the second step begins 8 us later.
        const std::int64_t blocks = multiprocessors - multiprocessors / 32;
        p.shares = static_cast<int>(std::min(
            {blocks / of_entry, std::int64_t{p.batch} * p.parts, std::int64_t{device::most_forward_shares}}));
        p.begun = p.parts_state + places.states;
        p.turned_heads = 0;
        p.section_heads = 1;  // the schedule has a section, which no block of the grid asks for
        if (p.parts > 1) return {static_cast<unsigned>(p.shares * of_entry)};
      } else {
        p.parts = parts > 0 ? parts : parts_of_keys(spec, config, steps, tiles.all(), multiprocessors);
        p.part_blocks = static_cast<int>(ceil_div(steps, p.parts));
        tiles.heads *= p.parts;  // in the schedule a part is a tile of another head
      }
    }
  }
  if (config.tile_order == TileOrder::sections) {
    p.turned_heads = turned_heads(static_cast<int>(tiles.heads), static_cast<int>(tiles.of_head),
                                  static_cast<int>(at_once));
    const std::int64_t others = std::max<std::int64_t>(tiles.heads - p.turned_heads, 1);
    const TileSections sections = sections_of(spec, p, others, tiles, heads_q, p.parts,
                                              static_cast<int>(at_once), l2_of_h100, early_rows / tokens);
    p.section_heads = sections.heads;
    p.section_rounds = sections.rounds;
  }
  // A persistent grid: one block for each multiprocessor, but no more than there are tiles.
  const std::int64_t blocks = std::min(tiles.all(), at_once);
  const unsigned rows = config.tile_order == TileOrder::waves
                            ? device::count_waves(static_cast<device::u32>(ceil_div(tiles.all(), blocks)))
                            : 1;
  return {static_cast<unsigned>(blocks), rows};
}

Grid merge_grid(const AttentionSpec& spec, const KernelConfig& config, int multiprocessors,
                const device::Sm90aForwardParams& p) {
  const int at_once = device::forward_merge_rows(spec.head_dim_v), tokens = config.block_m / p.packed_heads;
  const int rows = std::min(p.seqlen_q, tokens) * p.packed_heads;  // of a tile, at most
  const std::int64_t heads = p.num_heads_q / p.packed_heads, tiles = ceil_div(p.seqlen_q, tokens);
  if (divides_by_length(spec)) {
    const std::int64_t pieces =
        heads * tiles * rows * ceil_div(spec.head_dim_v, device::forward_merge_columns);
    return {static_cast<unsigned>(
        std::min(pieces * p.shares, std::int64_t{device::lengths_merge_blocks} * multiprocessors))};
  }
  return {static_cast<unsigned>(ceil_div(rows, at_once)), static_cast<unsigned>(tiles),
          static_cast<unsigned>(p.batch * heads)};
}

}  // namespace flashjit::cuda
