// The configs that exist for a spec on a target, those that fit, and the one that is taken untuned.
#pragma once

#include <string>
#include <vector>

#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// The limit that the config breaks, with the numbers; empty if the config fits.
std::string misfit(const AttentionSpec& spec, const Target& target, const KernelConfig& config);

// All configs that fit, are worth trying and have the spec's pins, ascending; never empty. Throws unsupported
// if the target has no kernel for the spec, invalid_spec with the broken limit if no config fits the pins.
std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target);
// The configs of the search space that may win for this shape.
std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target, const Shape& shape);

// The candidates outside the search space, ascending, each with
// the limit that it breaks or the reason why it would never win.
struct Rejection {
  KernelConfig config;
  std::string reason;
};
std::vector<Rejection> rejections(const AttentionSpec& spec, const Target& target);

// The distance of two configs: for each number, how many times one value is
// doubled to reach the other; for any other choice, 1 if the values differ.
double distance(const KernelConfig& a, const KernelConfig& b);

// The untuned choice, which is in search_space().
KernelConfig heuristic_config(const AttentionSpec& spec, const Target& target, const Shape& shape);
// Every config that heuristic_config() returns for some shape, ascending: a handful.
std::vector<KernelConfig> heuristic_configs(const AttentionSpec& spec, const Target& target);

}  // namespace flashjit
