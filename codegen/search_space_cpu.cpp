// CPUs: a tile is block_m query rows against block_n keys in one thread's scratch.
#include <algorithm>

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
  if (config.block_m <= 0 || config.block_m % 16 != 0 || config.block_m > 1024) {
    return wrong("block_m", config.block_m, "is not a multiple of 16 up to 1024");
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

// With AMX converting K and V costs as much as four times the rows do without; narrow heads take their scores
// of few keys at a time, whatever the block, others those of a whole one.
ConfigAxes axes(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes = {
      .block_m = {96, 192, 384}, .block_n = {64, 128, 256, 512}, .num_stages = {1}, .num_warps = {1}};
  if (uses_amx(spec, target)) axes.block_m = {256, 512, 1024};
  if (uses_amx(spec, target) && !keeps_amx_tiles(spec, target)) axes.block_n = {64, 128, 192, 256};
  if (const auto* blocks = find_mask<BlockSparseMask>(spec.mask)) {
    // Of whole lists, and larger: a tile converts what any of its lists keeps, for few of them.
    axes.block_m = {192, 384, 768};
    for (int& rows : axes.block_m) rows = std::max(rows / blocks->block_m, 1) * blocks->block_m;
    axes.block_m.erase(std::unique(axes.block_m.begin(), axes.block_m.end()), axes.block_m.end());
    axes.block_n = {blocks->block_n >= 64 ? blocks->block_n : device::round_up(64, blocks->block_n)};
    if (blocks->block_n % 128 == 0 && blocks->block_n > 128) axes.block_n.insert(axes.block_n.begin(), 128);
  }
  return axes;
}

std::string futility(const AttentionSpec&, const Target&, const KernelConfig&) {
  return {};
}

// Rows of a tile share the conversion of each K/V block, which is worth a fifth of the time at 48 rows and a
// fortieth at 192 (with AMX as much at four times the rows, which are to leave half of the second-level cache
// to what passes through); a launch with fewer rows, or too few tiles for its threads, cuts smaller ones
// (runtime/cpu/partition.hpp). block_n matters within the noise only, except with AMX: wide heads' sums go
// through memory once a block, whose scores fill the first-level cache; narrow ones' O stays in that cache
// for a block.
KernelConfig preferred(const AttentionSpec& spec, const Target& target, const Shape&) {
  const bool amx = uses_amx(spec, target);
  const int usual = keeps_amx_tiles(spec, target) ? 512 : amx && spec.head_dim <= 128 ? 192 : 128;
  const ConfigAxes choices = axes(spec, target);
  const bool has_usual =
      std::find(choices.block_n.begin(), choices.block_n.end(), usual) != choices.block_n.end();
  KernelConfig config{.block_m = choices.block_m.front(),
                      .block_n = has_usual ? usual : choices.block_n.front(),
                      .num_stages = 1,
                      .num_warps = 1};
  for (KernelConfig larger = config; const int block_m : choices.block_m) {
    larger.block_m = block_m;
    if (!amx || cpu_scratch(spec, target, larger) <= largest_scratch / 2) config = larger;
  }
  return config;
}

}  // namespace

const SearchSpaceFamily cpu_search_space = {refusal, misfit, axes, futility, preferred};

}  // namespace flashjit
