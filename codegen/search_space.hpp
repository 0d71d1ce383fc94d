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

// All configs worth trying that honour the spec's pins and fit. Never empty: throws invalid_spec with the limit.
std::vector<KernelConfig> search_space(const AttentionSpec& spec, const Target& target);

// The untuned choice: honours the pins, fits, and is one of search_space() when nothing is pinned.
KernelConfig heuristic_config(const AttentionSpec& spec, const Target& target, const Shape& shape);

}  // namespace flashjit
