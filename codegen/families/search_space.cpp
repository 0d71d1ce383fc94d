#include "codegen/families/search_space.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <type_traits>

#include "codegen/families/kernel_family.hpp"

namespace flashjit {
namespace {

// The choices that the family has, as text.
std::string str(const KernelConfig& config, const KernelFamily& family) {
  std::string text;
  for_each_choice([&](const char* name, auto choice, auto) {
    if (!family.has_choice(name)) return;
    text += (text.empty() ? "" : ", ") + std::string(name) + " " + choice_text(config.*choice);
  });
  return text;
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

// The product of the axes, with each pin in place of its axis, in ascending order.
std::vector<KernelConfig> candidates(const AttentionSpec& spec, const Target& target) {
  const ConfigAxes axes = family_of(spec.op, target).axes(spec, target);
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
  axes.for_each([&](const char*, const auto& values, auto choice, auto pin) {
    times(values, choice, spec.config.*pin);
  });
  return configs;
}

[[noreturn]] void refuse_pins(const AttentionSpec& spec, const Target& target,
                              const std::vector<KernelConfig>& misfits) {
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  const KernelConfig works = nearest(search_space(unpinned, target), with_pins(misfits.front(), spec.config));
  // The reason against the nearest candidate says more than the reason against the first.
  const KernelConfig& tried = nearest(misfits, works);
  throw Error(ErrorCode::invalid_spec, "config cannot be honoured on " + target.str() + ": " +
                                           misfit(spec, target, tried) + "; " +
                                           str(works, family_of(spec.op, target)) + " would work");
}

std::string unfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const KernelFamily& family = family_of(spec.op, target);
  std::string foreign;
  for_each_choice([&](const char* name, auto choice, auto) {
    if (!foreign.empty() || config.*choice == KernelConfig{}.*choice || family.has_choice(name)) return;
    const std::string others = targets_with_choice(spec.op, name);
    foreign = std::string(name) + " is no choice of op " + to_string(spec.op) + "'s kernels for " +
              target.str() + (others.empty() ? "" : ", only of those for " + others);
  });
  return foreign.empty() ? family.misfit(spec, target, config) : foreign;
}

}  // namespace

double distance(const KernelConfig& a, const KernelConfig& b) {
  double sum = 0;
  for_each_choice([&](const char*, auto choice, auto) {
    if constexpr (std::is_same_v<decltype(choice), int KernelConfig::*>) {
      if (a.*choice != b.*choice) sum += std::fabs(std::log2(double(a.*choice) / b.*choice));
    } else {
      sum += a.*choice != b.*choice;
    }
  });
  return sum;
}

std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config) {
  const std::string refused = why_unsupported(spec, target);
  return refused.empty() ? unfit(spec, target, config) : refused;
}

std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target) {
  const KernelFamily& family = family_of(spec.op, target);
  if (const std::string refused = why_unsupported(spec, target); !refused.empty())
    throw Error(ErrorCode::unsupported, refused);
  std::vector<KernelConfig> fitting, worth;
  const std::vector<KernelConfig> all = candidates(spec, target);
  for (const KernelConfig& config : all) {
    if (!unfit(spec, target, config).empty()) continue;
    fitting.push_back(config);
    if (family.futility(spec, target, config).empty()) worth.push_back(config);
  }
  if (!worth.empty()) return worth;
  if (!fitting.empty()) return fitting;
  if (spec.config.empty()) {
    throw Error(ErrorCode::internal, "no config fits " + spec.to_json() + " on " + target.str());
  }
  refuse_pins(spec, target, all);
}

std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  std::vector<KernelConfig> space = search_space(spec, target);
  if (!spec.config.pack_gqa && !packing_pays(shape))
    std::erase_if(space, [](const KernelConfig& config) { return config.pack_gqa; });
  return space;
}

std::vector<Rejection> rejections(const AttentionSpec& spec, const Target& target) {
  const std::vector<KernelConfig> tried = search_space(spec, target);
  std::vector<Rejection> rejected;
  for (const KernelConfig& config : candidates(spec, target)) {
    if (std::binary_search(tried.begin(), tried.end(), config)) continue;
    std::string reason = unfit(spec, target, config);
    if (reason.empty()) reason = family_of(spec.op, target).futility(spec, target, config);
    rejected.push_back({config, std::move(reason)});
  }
  return rejected;
}

KernelConfig heuristic_config(const AttentionSpec& spec, const Target& target, const Shape& shape) {
  const std::vector<KernelConfig> space = search_space(spec, target);
  return nearest(space, with_pins(family_of(spec.op, target).preferred(spec, target, shape), spec.config));
}

std::vector<KernelConfig> heuristic_configs(const AttentionSpec& spec, const Target& target) {
  // Beyond some power of two, lengths and heads no longer change the choice. Of page sizes it matters how
  // many keys lie together.
  constexpr int max_seqlen_log2 = 20, max_heads_log2 = 10, max_group_log2 = 8;
  const std::vector<int> page_sizes = spec.paged ? std::vector{1, 16, 32} : std::vector{0};
  const int max_q_log2 = info_of(spec.op).few_rows ? 6 : max_seqlen_log2;
  std::set<KernelConfig> preferred;
  for (int q = 0; q <= max_q_log2; ++q)
    for (int k = 0; k <= max_seqlen_log2; ++k)
      for (int heads = 0; heads <= max_heads_log2; ++heads)
        for (int group = 0; group <= std::min(heads, max_group_log2); ++group)
          for (const int page_size : page_sizes) {
            const Shape shape{.seqlen_q = 1 << q,
                              .seqlen_k = 1 << k,
                              .num_heads_q = 1 << heads,
                              .num_heads_kv = 1 << (heads - group),
                              .page_size = page_size};
            preferred.insert(family_of(spec.op, target).preferred(spec, target, bucket(shape)));
          }
  const std::vector<KernelConfig> space = search_space(spec, target);
  std::set<KernelConfig> configs;
  for (const KernelConfig& config : preferred) configs.insert(nearest(space, with_pins(config, spec.config)));
  return {configs.begin(), configs.end()};
}

}  // namespace flashjit
