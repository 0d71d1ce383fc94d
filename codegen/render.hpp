// Spec + target + config -> source text.
#pragma once

#include <string>

#include "kernel_source.hpp"
#include "spec.hpp"

namespace flashjit {

// Includes, Spec with the composed mask, Config and one entry a step; for sm_90a its products. `spec` is
// validated and `config` complete and fitting (see search_space.hpp).
KernelSource render(const AttentionSpec& spec, const Target& target, const KernelConfig& config);

// The same translation unit with every header folded in, for reading and for nvcc.
std::string standalone(const KernelSource& source);

}  // namespace flashjit
