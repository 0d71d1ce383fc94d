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
  const auto* causal = find_mask<CausalMask>(spec.mask);
  const auto* window = find_mask<SlidingWindowMask>(spec.mask);
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
// its choice takes at most 4% longer than the best.
int BackwardGroups::heads_of_tile(const device::ProblemParams& p, i64 key_rows) const {
  const int group = p.num_heads_q / std::max(p.num_heads_kv, 1);
  if (!can_divide(p.num_heads_q, p.num_heads_kv)) return std::max(group, 1);
  if (exceeds_cache(p.num_heads_q, p.num_heads_kv, p.seqlen_q)) return 1;
  if (i64{p.num_heads_kv} * key_rows > most_rows()) return group;
  const Steps steps = steps_of(kernel.spec, kernel.config, p);
  const double block_n = kernel.config.block_n, processors = kernel.parallelism;
  const double key_tiles = static_cast<double>(i64{p.num_heads_kv} * key_rows) / block_n;
  const bool even = !kernel.spec.varlen && static_cast<double>(steps.longest) <= steps.mean;
  int best = group;
  double least = 0;
  for (int heads = group; heads >= 1; --heads) {
    if (group % heads != 0) continue;
    const bool divides = heads < group;
    const double tiles = key_tiles * (group / heads), own = divides ? 3.5 : 3;
    const double longest = heads * static_cast<double>(steps.longest) + own, mean = heads * steps.mean + own;
    double cost = even ? longest * static_cast<double>((static_cast<i64>(tiles) - 1) / kernel.parallelism + 1)
                       : std::max(longest, tiles * mean / processors + 0.8 * (mean - own));
    if (divides) cost += 2 + key_tiles * 4 / kernel.config.block_m;
    if (heads == group || cost < least) {
      least = cost;
      best = heads;
    }
  }
  return best;
}

i64 BackwardGroups::rows_of_sums(i64 heads_q, i64 heads_kv, i64 key_rows, i64 seqlen_q) const {
  if (!can_divide(heads_q, heads_kv)) return 0;
  const i64 rows = heads_kv * key_rows;
  return exceeds_cache(heads_q, heads_kv, seqlen_q) ? rows : std::min(rows, most_rows());
}

i64 BackwardGroups::bytes_of_head(const AttentionSpec& spec, i64 seqlen_q) {
  return seqlen_q * (2 * spec.head_dim + 2 * spec.head_dim_v + 4 * device::cuda_backward_row(spec.head_dim));
}

bool BackwardGroups::can_divide(i64 heads_q, i64 heads_kv) const {
  const CudaBackwardKernels kernels(kernel.spec, kernel.config);
  return kernels.persistent && !kernel.spec.deterministic && heads_q > heads_kv;
}
bool BackwardGroups::exceeds_cache(i64 heads_q, i64 heads_kv, i64 seqlen_q) const {
  return heads_q / std::max(heads_kv, i64{1}) * bytes_of_head(kernel.spec, seqlen_q) > rows_in_cache;
}
// Four work tiles of whole groups for each multiprocessor are enough: more are not divided to fill a GPU.
i64 BackwardGroups::most_rows() const {
  return i64{4} * kernel.parallelism * kernel.config.block_n;
}

}  // namespace flashjit
