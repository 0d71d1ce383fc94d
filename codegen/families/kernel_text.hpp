// The pieces of rendered text that the kernels of all families share.
#pragma once

#include <string>

#include "codegen/families/kernel_family.hpp"
#include "codegen/formulas/formula_functors.hpp"

namespace flashjit {

// The #include lines of the kernel's header and of its masks' headers; `pages`: the
// header that the kernel reads besides where the spec is paged.
std::string include_lines(const char* kernel, const AttentionSpec& spec, const char* pages = nullptr);

// The header of append_kv's kernel.
const char* append_header(bool is_cpu, const AttentionSpec& spec);

// The name of its struct.
std::string name_of_append(bool is_cpu, const AttentionSpec& spec);

// Adds the step by which a decode appends, if the spec asks for it: its text after all others, its step
// before them.
void add_append_step(const AttentionSpec& spec, KernelSource& source);

// The structs of the rendered text, in an unnamed namespace so that kernels of
// different specs can be loaded side by side. Spec holds everything that differs from
// `defaults`, a struct of the kernel's header; before it stand its formulas, with the
// kernel's `params` as Params. Then comes the text `between`. Config holds the named
// choices and, if `products` is not empty, that type as Products.
std::string structs(const AttentionSpec& spec, const char* defaults, const std::string& params,
                    const std::string& between, KernelFamily::Names choices, const KernelConfig& config,
                    const std::string& products, ComputedAhead ahead = ComputedAhead::row);

// Whether a mask's test reads tables in memory.
bool reads_tables(const AttentionSpec& spec);

}  // namespace flashjit
