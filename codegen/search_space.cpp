#include "search_space.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "search_space_family.hpp"

namespace flashjit {
namespace {

const SearchSpaceFamily& family_of(const Target& target) {
  if (target.specific) return sm90a_search_space;
  return target.is_cuda() ? cuda_search_space : cpu_search_space;
}

// Without the choices that other targets have.
std::string str(const KernelConfig& config, const Target& target) {
  std::string text;
  for_each_choice([&](const char* name, auto choice, auto) {
    if (!target.specific && !std::is_same_v<decltype(choice), int KernelConfig::*>) return;
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + choice_text(config.*choice);
  });
  return text;
}

// Doublings between two configs, summed over the choices that are numbers; one for each other that differs.
double distance(const KernelConfig& a, const KernelConfig& b) {
  double sum = 0;
  for_each_choice([&](const char*, auto choice, auto) {
    if constexpr (std::is_same_v<decltype(choice), int KernelConfig::*>) {
      sum += std::fabs(std::log2(double(a.*choice) / b.*choice));
    } else {
      sum += a.*choice != b.*choice;
    }
  });
  return sum;
}

const KernelConfig& nearest(const std::vector<KernelConfig>& configs, const KernelConfig& wanted) {
  return *std::min_element(configs.begin(), configs.end(), [&](const KernelConfig& a, const KernelConfig& b) {
    return distance(a, wanted) < distance(b, wanted);
  });
}

KernelConfig with_pins(KernelConfig config, const PinnedConfig& pins) {
  for_each_choice([&](const char*, auto choice, auto pin) {
    if (pins.*pin) config.*choice = *(pins.*pin);
  });
  return config;
}

// The product of the axes with pins in place of their axis, in ascending order.
std::vector<KernelConfig> candidates(const AttentionSpec& spec, const Target& target) {
  const ConfigAxes axes = family_of(target).axes(spec, target);
  std::vector<KernelConfig> configs = {{}};
  const auto times = [&](const auto& values, auto choice, auto pin) {
    std::vector<KernelConfig> longer;
    for (const KernelConfig& config : configs) {
      const auto add = [&](auto value) { (longer.emplace_back(config)).*choice = value; };
      if (pin) {
        add(*pin);
      } else {
        for (const auto value : values) add(value);
      }
    }
    configs = std::move(longer);
  };
  times(axes.block_m, &KernelConfig::block_m, spec.config.block_m);
  times(axes.block_n, &KernelConfig::block_n, spec.config.block_n);
  times(axes.num_stages, &KernelConfig::num_stages, spec.config.num_stages);
  times(axes.num_warps, &KernelConfig::num_warps, spec.config.num_warps);
  times(axes.q_in_registers, &KernelConfig::q_in_registers, spec.config.q_in_registers);
  times(axes.ping_pong, &KernelConfig::ping_pong, spec.config.ping_pong);
  times(axes.tile_order, &KernelConfig::tile_order, spec.config.tile_order);
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
                                           misfit(spec, target, tried) + "; " + str(works, target) +
                                           " would work");
}

std::string unfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  if (!target.specific) {
    KernelConfig plain = config;
    plain.q_in_registers = plain.ping_pong = false;
    plain.tile_order = TileOrder::heads;
    if (plain != config)
      return "q_in_registers, ping_pong and tile_order are choices of sm_90a's kernels only";
  }
  return family_of(target).misfit(spec, target, config);
}

}  // namespace

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const std::string refusal = family_of(target).refusal(spec, target);
  return refusal.empty() ? unfit(spec, target, config) : refusal;
}

std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target) {
  const SearchSpaceFamily& family = family_of(target);
  if (const std::string refusal = family.refusal(spec, target); !refusal.empty()) {
    throw Error(ErrorCode::unsupported, refusal);
  }
  std::vector<KernelConfig> fitting, worth;
  const std::vector<KernelConfig> all = candidates(spec, target);
  for (const KernelConfig& config : all) {
    if (!unfit(spec, target, config).empty()) continue;
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
