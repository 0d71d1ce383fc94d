// CPUs: a tile is block_m query rows against block_n keys in one thread's scratch.
#include <algorithm>
#include <cstdint>

#include "cpu_products.hpp"
#include "mask_rules.hpp"
#include "search_space_family.hpp"

namespace flashjit {
namespace {

constexpr int largest_scratch = 2 << 20;  // bytes of a worker: within a second-level cache

std::string refusal(const AttentionSpec&, const Target&) {
  return {};
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const auto wrong = [](const char* field, int value, const std::string& rule) {
    return std::string(field) + " " + std::to_string(value) + " " + rule;
  };
  if (config.num_warps != 1) return wrong("num_warps", config.num_warps, "is not 1, as it must be on a CPU");
  if (config.num_stages != 1)
    return wrong("num_stages", config.num_stages, "is not 1, as it must be on a CPU");
  if (config.block_m <= 0 || config.block_m % 16 != 0 || config.block_m > 512) {
    return wrong("block_m", config.block_m, "is not a multiple of 16 up to 512");
  }
  if (config.block_n <= 0 || config.block_n % 16 != 0 || config.block_n > 1024) {
    return wrong("block_n", config.block_n, "is not a multiple of 16 up to 1024");
  }
  const int bytes = cpu_scratch(spec, target, config);
  if (bytes > largest_scratch) {
    return "block_m " + std::to_string(config.block_m) + " and block_n " + std::to_string(config.block_n) +
           " need " + std::to_string(bytes) + " bytes of scratch, more than the " +
           std::to_string(largest_scratch) + " of a thread on " + target.str();
  }
  return {};
}

// Rows that are worked on at a time: two vectors with AMX, else three (device::cpu_unit_rows, or half as
// many), or two. Those of one query block of a list are to be units of their own where they can, or they
// would also compute what only others see.
bool aligned_with(const BlockSparseMask& blocks, bool amx, int block_m) {
  const bool in_threes = !amx && block_m % device::cpu_unit_rows == 0;
  return block_m % blocks.block_m == 0 &&
         (!amx && blocks.block_m % device::cpu_unit_rows == 0 ? in_threes : !in_threes && block_m % 32 == 0);
}

// Tiles are made of units; others fit, but leave lanes idle.
ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  const bool amx = uses_amx(spec, target);
  ConfigAxes axes = {
      .block_m = {48, 96, 192, 384}, .block_n = {64, 128, 256, 512}, .num_stages = {1}, .num_warps = {1}};
  if (amx) axes.block_m = {32, 64, 128, 256, 512};
  if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    axes.block_m.clear();
    for (int block_m = blocks->block_m; block_m <= 512; block_m += blocks->block_m)
      if (aligned_with(*blocks, amx, block_m)) axes.block_m.push_back(block_m);
    axes.block_n = {blocks->block_n >= 64 ? blocks->block_n : device::round_up(64, blocks->block_n)};
    if (blocks->block_n % 128 == 0 && blocks->block_n > 128) axes.block_n.insert(axes.block_n.begin(), 128);
  }
  return axes;
}

std::string futility(const AttentionSpec&, const Target&, const KernelConfig&) {
  return {};
}

// Rows of a tile share the conversion of each K/V block, which is worth a fifth of the time at 48 rows and a
// fortieth at 192 (with AMX as much at four times the rows); but there should be tiles enough for many
// threads. block_n matters within the noise only, except with AMX, whose sums go through memory once a block.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  constexpr int enough_tiles = 16;
  const bool amx = uses_amx(spec, target);
  const int largest = amx ? 512 : 384, usual = amx ? 256 : 128;
  const ConfigAxes choices = axes(spec, target);
  // Heads beyond enough count no more: the product stays small for shapes of any size.
  const std::int64_t heads =
      std::min<std::int64_t>(std::int64_t{shape.batch} * shape.num_heads_q, enough_tiles);
  const auto tiles = [&](int block_m) { return heads * ((shape.seqlen_q - 1) / block_m + 1); };
  int block_m = choices.block_m.front();
  for (const int rows : choices.block_m)
    if (rows <= largest && rows / 2 < shape.seqlen_q && tiles(rows) >= enough_tiles) block_m = rows;
  const bool has_usual =
      std::find(choices.block_n.begin(), choices.block_n.end(), usual) != choices.block_n.end();
  return {.block_m = block_m,
          .block_n = has_usual ? usual : choices.block_n.front(),
          .num_stages = 1,
          .num_warps = 1};
}

}  // namespace

const SearchSpaceFamily cpu_search_space = {refusal, misfit, axes, futility, preferred};

}  // namespace flashjit
