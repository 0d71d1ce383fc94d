// The pieces of rendered text that kernels of all families have.
#pragma once

#include <string>

#include "families/kernel_family.hpp"

namespace flashjit {

// Includes of the kernel's header and of its masks'.
std::string include_lines(const char* kernel, const AttentionSpec& spec);

// In an unnamed namespace, so that kernels of different specs can be loaded side by side: Spec, with what
// differs from `defaults`, a struct of the kernel's header; `between`; and Config with the named choices
// and `products`, the type that it takes from elsewhere, if any.
std::string structs(const AttentionSpec& spec, const char* defaults, const std::string& between,
                    KernelFamily::Names choices, const KernelConfig& config, const std::string& products);

// Whether a mask's test looks things up in memory.
bool reads_tables(const AttentionSpec& spec);

}  // namespace flashjit
