#include "codegen/families/batch_invariant.hpp"

#include <algorithm>
#include <cstdlib>

namespace flashjit {
namespace {

int nearest(const std::vector<int>& axis, int value) {
  return *std::min_element(axis.begin(), axis.end(),
                           [&](int a, int b) { return std::abs(a - value) < std::abs(b - value); });
}

bool fixes_rows(const AttentionSpec& spec) {
  return info_of(spec.op).writes_gradients;
}

// Whose blocks all sequences get: those of long ones. But wgmma's forward gives long ones of some narrow
// heads narrower blocks, by which short ones lose more than long ones gain (tests/bench/gpu_forward.md).
Shape model_shape(const AttentionSpec& spec, const Target& target) {
  const bool narrow = std::max(spec.head_dim, spec.head_dim_v) <= 64;
  const bool short_ones = narrow && target.has(Instructions::wgmma) && !fixes_rows(spec);
  const int batch = short_ones ? 16 : 1, seqlen = 16384 / batch;
  return {.batch = batch, .seqlen_q = seqlen, .seqlen_k = seqlen, .num_heads_q = 16, .num_heads_kv = 16};
}

// The blocks of heuristic_config(), which would try the whole search space.
KernelConfig fixed_blocks(const AttentionSpec& spec, const Target& target) {
  AttentionSpec any = spec;
  any.batch_invariant = false;
  any.config = {};
  const KernelFamily& family = family_of(spec.op, target);
  KernelConfig config = family.preferred(any, target, model_shape(spec, target));
  const ConfigAxes axes = family.axes(any, target);
  config.block_m = nearest(axes.block_m, config.block_m);
  config.block_n = nearest(axes.block_n, config.block_n);
  return config;
}

}  // namespace

void fix_blocks(const AttentionSpec& spec, const Target& target, ConfigAxes& axes) {
  if (!spec.batch_invariant) return;
  const KernelConfig fixed = fixed_blocks(spec, target);
  axes.block_n = {fixed.block_n};
  if (fixes_rows(spec)) axes.block_m = {fixed.block_m};
}

std::string not_fixed_blocks(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!spec.batch_invariant) return {};
  const KernelConfig fixed = fixed_blocks(spec, target);
  const auto text = [&](const KernelConfig& of) {
    return std::to_string(of.block_n) + " keys" +
           (fixes_rows(spec) && fixed.block_m ? " and " + std::to_string(of.block_m) + " rows" : "");
  };
  if (config.block_n == fixed.block_n && (!fixes_rows(spec) || config.block_m == fixed.block_m)) return {};
  return "batch_invariant fixes the order of sums: by blocks of " + text(fixed) + ", not of " + text(config);
}

}  // namespace flashjit
