// Which configs exist for a spec on a target, which of them fit, and which is taken untuned.
#pragma once

#include <string>
#include <vector>

#include "config.hpp"
#include "shape.hpp"
#include "spec.hpp"
#include "target.hpp"

namespace flashjit {

// Empty when the config fits; otherwise the limit it breaks, with the numbers.
std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config);

// All configs worth trying that honour the spec's pins and fit, ascending. Never empty: throws unsupported
// where the target has no kernel for the spec at all, invalid_spec with the limit that the pins break.
std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target);
// Those of them that may win at that shape.
std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target, const Shape& shape);

// The others, ascending: the limit that each breaks, or why it would never win.
struct Rejection {
  KernelConfig config;
  std::string reason;
};
std::vector<Rejection> rejections(const AttentionSpec& spec, const Target& target);

// Doublings between two configs, summed over the choices that are numbers; one for each other that differs.
double distance(const KernelConfig& a, const KernelConfig& b);

// The untuned choice, one of search_space().
KernelConfig heuristic_config(const AttentionSpec& spec, const Target& target, const Shape& shape);
// Every config that it takes for some shape, ascending: a handful.
std::vector<KernelConfig> heuristic_configs(const AttentionSpec& spec, const Target& target);

}  // namespace flashjit
