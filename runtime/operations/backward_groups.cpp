#include "runtime/operations/backward_groups.hpp"

#include <algorithm>

#include "codegen/families/backward_kernels.hpp"
#include "codegen/spec/mask_rules.hpp"
#include "templates/shared/backward_cuda_params.h"

namespace flashjit {
namespace {

using i64 = std::int64_t;

// Blocks of rows that work tiles of one query head have.
struct Steps {
  i64 longest = 0;
  double mean = 0;
};

// Counts the rows that see a block of keys, by masks whose rows are an interval. Others keep all rows, as
// only the device knows better.
Steps steps_of(const AttentionSpec& spec, const KernelConfig& config, const device::ProblemParams& p) {
  const auto* causal = spec.offsets ? nullptr : find_mask<CausalMask>(spec.mask);
  const auto* window = spec.offsets ? nullptr : find_mask<SlidingWindowMask>(spec.mask);
  const i64 rows = p.seqlen_q, keys = p.seqlen_k, block_n = config.block_n;
  const auto shift = [&](CausalAlign align) { return align == CausalAlign::bottom_right ? keys - rows : 0; };
  Steps steps;
  i64 blocks = 0, sum = 0;
  for (i64 key = 0; key < std::max(keys, i64{1}); key += block_n, ++blocks) {
    i64 begin = 0, end = rows;
    if (causal) begin = key - shift(causal->align);
    if (window && !window->sinks) {
      begin = std::max(begin, key - shift(window->align) - p.window_right);
      end = key + block_n - shift(window->align) + p.window_left;
    }
    const i64 seen = std::max(std::min(end, rows) - std::max(begin, i64{0}), i64{0});
    const i64 count = (seen + config.block_m - 1) / config.block_m;
    steps.longest = std::max(steps.longest, count);
    sum += count;
  }
  steps.mean = static_cast<double>(sum) / static_cast<double>(blocks);
  return steps;
}

}  // namespace

// A count of steps, each a block of rows, until the last multiprocessor ends:
// - A work tile takes 3 steps to begin and to end, half a step more where it adds to sums.
// - Tiles of unlike lengths end at unlike times: 0.8 of a mean one on average. Equal ones come in rounds.
// - Sums are cleared, read and converted at the speed of memory: 4 / block_m steps for a tile's keys, and two
//   steps for a launch more.
// Fitted to times of 25 shapes on an H100, all divisors of their groups (tests/bench/log/gpu_backward.md):
// its choice takes at most 4.1% longer than the best.
BackwardGroups::Tile BackwardGroups::tile(const device::ProblemParams& p, i64 key_rows) const {
  const int group = std::max(p.num_heads_q / std::max(p.num_heads_kv, 1), 1);
  constexpr int unit = device::backward_row_unit;
  const int units = std::max((p.seqlen_q - 1) / unit + 1, 1);
  const Tile whole{.heads = group, .row_parts = 1, .rows = units * unit};
  if (!can_divide(p.num_heads_q, p.num_heads_kv)) return whole;
  if (exceeds_cache(p.num_heads_q, p.num_heads_kv, p.seqlen_q))
    return {.heads = 1, .row_parts = 1, .rows = units * unit};
  if (i64{p.num_heads_kv} * key_rows > most_rows(p.num_heads_q, p.num_heads_kv)) return whole;
  const Steps steps = steps_of(kernel.spec, kernel.config, p);
  const double block_n = kernel.config.block_n, processors = parallelism();
  const double key_tiles = static_cast<double>(i64{p.num_heads_kv} * key_rows) / block_n;
  const bool even = !kernel.spec.varlen && static_cast<double>(steps.longest) <= steps.mean;
  Tile best = whole;
  double least = 0;
  const auto consider = [&](const Tile& tile) {
    const bool divides = tile.heads < group || tile.row_parts > 1;
    const int head_parts = group / tile.heads;
    const double tiles = key_tiles * head_parts * tile.row_parts, own = divides ? 3.5 : 3;
    const i64 of_part = (tile.rows - 1) / kernel.config.block_m + 1;
    const i64 rounds = (static_cast<i64>(tiles) - 1) / parallelism() + 1;
    const double longest = tile.heads * static_cast<double>(std::min(steps.longest, of_part)) + own;
    const double mean = tile.heads * steps.mean / tile.row_parts + own;
    double cost = even ? longest * static_cast<double>(rounds)
                       : std::max(longest, tiles * mean / processors + 0.8 * (mean - own));
    if (divides) cost += 2 + key_tiles * 4 / kernel.config.block_m;
    if (least > 0 && cost >= least) return;
    least = cost;
    best = tile;
  };
  for (int heads = group; heads >= 1; --heads)
    if (group % heads == 0) consider({.heads = heads, .row_parts = 1, .rows = whole.rows});
  if (!divides_rows()) return best;
  for (int parts = 2; parts <= units && parts * key_tiles * group <= processors; ++parts) {
    const int of_part = (units - 1) / parts + 1;
    consider({.heads = 1, .row_parts = (units - 1) / of_part + 1, .rows = of_part * unit});
  }
  return best;
}

i64 BackwardGroups::rows_of_sums(i64 heads_q, i64 heads_kv, i64 key_rows, i64 seqlen_q) const {
  if (!can_divide(heads_q, heads_kv)) return 0;
  const i64 rows = heads_kv * key_rows;
  if (exceeds_cache(heads_q, heads_kv, seqlen_q)) return rows;
  return std::min(rows, most_rows(heads_q, heads_kv));
}

i64 BackwardGroups::most_row_parts(i64 heads, i64 seqlen_q) const {
  constexpr i64 unit = device::backward_row_unit;
  if (!can_divide(1, 1)) return 0;  // no rows
  return std::min<i64>(heads, parallelism()) * ((seqlen_q + unit - 1) / unit);
}

i64 BackwardGroups::bytes_of_head(const AttentionSpec& spec, i64 seqlen_q) {
  return seqlen_q * (2 * spec.head_dim + 2 * spec.head_dim_v + 4 * device::cuda_backward_row(spec.head_dim));
}

// Work tiles at a time.
int BackwardGroups::parallelism() const {
  return kernel.parallelism * CudaBackwardKernels(kernel.spec, kernel.config, kernel.target).resident_blocks;
}
bool BackwardGroups::can_divide(i64 heads_q, i64 heads_kv) const {
  const CudaBackwardKernels kernels(kernel.spec, kernel.config, kernel.target);
  return kernels.persistent && !kernel.spec.deterministic && (heads_q > heads_kv || divides_rows());
}
bool BackwardGroups::divides_rows() const {
  return !CudaBackwardKernels(kernel.spec, kernel.config, kernel.target).has_row_bits;
}
bool BackwardGroups::exceeds_cache(i64 heads_q, i64 heads_kv, i64 seqlen_q) const {
  return heads_q > heads_kv &&
         heads_q / std::max(heads_kv, i64{1}) * bytes_of_head(kernel.spec, seqlen_q) > rows_in_cache;
}
// Four work tiles of whole groups for each multiprocessor are enough: more are not divided to fill a GPU.
// Rows are divided where there is not one of a head.
i64 BackwardGroups::most_rows(i64 heads_q, i64 heads_kv) const {
  return i64{heads_q > heads_kv ? 4 : 1} * parallelism() * kernel.config.block_n;
}

}  // namespace flashjit
