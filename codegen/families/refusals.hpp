// Why configs cannot run or are not worth trying, as several families say it.
#pragma once

#include <initializer_list>
#include <string>

#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// "num_warps 3 is not 4 or 8"
std::string wrong(const char* choice, int value, const std::string& rule);

// Caches of fp8_ds_mla, for families of GPUs that have no kernel for them.
std::string no_ds_mla_by_mma(const AttentionSpec& spec, const Target&);

// A block's shared memory: empty if the bytes fit, else the choices and why they do not.
std::string too_much_shared_memory(const KernelConfig& config, std::initializer_list<const char*> choices,
                                   int bytes, const Target& target);

// A thread's sums in registers. Found by compiling: more leave too few registers for everything else.
inline constexpr int most_sums = 192;
std::string too_many_sums(int held);

// On CPUs. Bytes of scratch of one thread: they fit its second-level cache.
inline constexpr int largest_scratch = 2 << 20;
std::string too_much_scratch(const KernelConfig& config, std::initializer_list<const char*> choices,
                             int bytes, const Target& target);
// num_warps and num_stages, which a CPU has not, and the choices whose values are not multiples of `step` up
// to 1024.
std::string not_of_cpus(const KernelConfig& config, std::initializer_list<const char*> choices, int step);

}  // namespace flashjit
