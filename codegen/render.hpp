// Spec + target + config -> source text.
#pragma once

#include <string>

#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// The rendered text: includes, Spec with the composed mask, Config, one function a step; for
// sm_90a also its products. `spec` is validated; `config` is complete and fits (search_space.hpp).
KernelSource render(const AttentionSpec& spec, const Target& target, const KernelConfig& config);

// The same translation unit with every header folded in, for reading and for nvcc.
std::string standalone(const KernelSource& source);

}  // namespace flashjit
