#include "search_space.hpp"

#include <algorithm>
#include <cmath>

#include "search_space_family.hpp"

namespace flashjit {
namespace {

const SearchSpaceFamily& family_of(const Target& target) {
  return target.is_cuda() ? cuda_search_space : cpu_search_space;
}

std::string str(const KernelConfig& config) {
  return "block_m " + std::to_string(config.block_m) + ", block_n " + std::to_string(config.block_n) +
         ", num_stages " + std::to_string(config.num_stages) + ", num_warps " +
         std::to_string(config.num_warps);
}

// Doublings between two configs, summed over the choices.
double distance(const KernelConfig& a, const KernelConfig& b) {
  const auto doublings = [](int x, int y) { return std::fabs(std::log2(double(x) / y)); };
  return doublings(a.block_m, b.block_m) + doublings(a.block_n, b.block_n) +
         doublings(a.num_stages, b.num_stages) + doublings(a.num_warps, b.num_warps);
}

const KernelConfig& nearest(const std::vector<KernelConfig>& configs, const KernelConfig& wanted) {
  return *std::min_element(configs.begin(), configs.end(), [&](const KernelConfig& a, const KernelConfig& b) {
    return distance(a, wanted) < distance(b, wanted);
  });
}

KernelConfig with_pins(KernelConfig config, const PinnedConfig& pins) {
  return {.block_m = pins.block_m.value_or(config.block_m),
          .block_n = pins.block_n.value_or(config.block_n),
          .num_stages = pins.num_stages.value_or(config.num_stages),
          .num_warps = pins.num_warps.value_or(config.num_warps)};
}

// The product of the axes with pins in place of their axis, in ascending order.
std::vector<KernelConfig> candidates(const AttentionSpec& spec, const Target& target) {
  ConfigAxes axes = family_of(target).axes(spec, target);
  if (spec.config.block_m) axes.block_m = {*spec.config.block_m};
  if (spec.config.block_n) axes.block_n = {*spec.config.block_n};
  if (spec.config.num_stages) axes.num_stages = {*spec.config.num_stages};
  if (spec.config.num_warps) axes.num_warps = {*spec.config.num_warps};
  std::vector<KernelConfig> configs;
  for (int block_m : axes.block_m)
    for (int block_n : axes.block_n)
      for (int num_stages : axes.num_stages)
        for (int num_warps : axes.num_warps) configs.push_back({block_m, block_n, num_stages, num_warps});
  return configs;
}

[[noreturn]] void refuse_pins(const AttentionSpec& spec, const Target& target,
                              const std::vector<KernelConfig>& misfits) {
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  const KernelConfig works = nearest(search_space(unpinned, target), with_pins(misfits.front(), spec.config));
  // The reason against the least wrong candidate says more than that against the first.
  const KernelConfig& tried = nearest(misfits, works);
  throw Error(ErrorCode::invalid_spec, "config cannot be honoured on " + target.str() + ": " +
                                           misfit(spec, target, tried) + "; " + str(works) + " would work");
}

}  // namespace

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const std::string refusal = family_of(target).refusal(spec, target);
  return refusal.empty() ? family_of(target).misfit(spec, target, config) : refusal;
}

std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target) {
  const SearchSpaceFamily& family = family_of(target);
  if (const std::string refusal = family.refusal(spec, target); !refusal.empty()) {
    throw Error(ErrorCode::unsupported, refusal);
  }
  std::vector<KernelConfig> fitting, worth;
  const std::vector<KernelConfig> all = candidates(spec, target);
  for (const KernelConfig& config : all) {
    if (!family.misfit(spec, target, config).empty()) continue;
    fitting.push_back(config);
    if (family.worth_trying(spec, target, config)) worth.push_back(config);
  }
  if (!worth.empty()) return worth;
  if (!fitting.empty()) return fitting;
  if (spec.config.empty()) {
    throw Error(ErrorCode::internal, "no config fits " + spec.to_json() + " on " + target.str());
  }
  refuse_pins(spec, target, all);
}

KernelConfig heuristic_config(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  const std::vector<KernelConfig> space = search_space(spec, target);
  return nearest(space, with_pins(family_of(target).preferred(spec, target, shape), spec.config));
}

}  // namespace flashjit
