#include "codegen/families/batch_invariant.hpp"

#include <algorithm>
#include <cstdlib>

namespace flashjit {
namespace {

int nearest(const std::vector<int>& axis, int value) {
  return *std::min_element(axis.begin(), axis.end(),
                           [&](int a, int b) { return std::abs(a - value) < std::abs(b - value); });
}

// The blocks of heuristic_config(), which would try the whole search space.
KernelConfig of_long_sequences(const AttentionSpec& spec, const Target& target) {
  constexpr Shape shape{
      .batch = 1, .seqlen_q = 16384, .seqlen_k = 16384, .num_heads_q = 16, .num_heads_kv = 16};
  AttentionSpec any = spec;
  any.batch_invariant = false;
  any.config = {};
  const KernelFamily& family = family_of(spec.op, target);
  KernelConfig config = family.preferred(any, target, shape);
  const ConfigAxes axes = family.axes(any, target);
  config.block_m = nearest(axes.block_m, config.block_m);
  config.block_n = nearest(axes.block_n, config.block_n);
  return config;
}

bool fixes_rows(const AttentionSpec& spec) {
  return info_of(spec.op).writes_gradients;
}

}  // namespace

void fix_blocks(const AttentionSpec& spec, const Target& target, ConfigAxes& axes) {
  if (!spec.batch_invariant) return;
  const KernelConfig fixed = of_long_sequences(spec, target);
  axes.block_n = {fixed.block_n};
  if (fixes_rows(spec)) axes.block_m = {fixed.block_m};
}

std::string not_fixed_blocks(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!spec.batch_invariant) return {};
  const KernelConfig fixed = of_long_sequences(spec, target);
  const auto text = [&](const KernelConfig& of) {
    return std::to_string(of.block_n) + " keys" +
           (fixes_rows(spec) && fixed.block_m ? " and " + std::to_string(of.block_m) + " rows" : "");
  };
  if (config.block_n == fixed.block_n && (!fixes_rows(spec) || config.block_m == fixed.block_m)) return {};
  return "batch_invariant fixes the order of sums: by blocks of " + text(fixed) + ", not of " + text(config);
}

}  // namespace flashjit
