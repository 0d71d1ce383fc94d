// The choices that batch_invariant fixes in the configs of forwards and backwards.
#pragma once

#include <string>

#include "codegen/base/target.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

// With batch_invariant all launches have the blocks that order sums: block_n, by which a row's keys come, and
// in a backward block_m, by which a key's rows come. They are those of the untuned config without the field
// for long sequences; in a forward by wgmma of narrow heads, for short ones. No other choice changes bits.

// Leaves one value of them, if the spec asks for it.
void fix_blocks(const AttentionSpec& spec, const Target& target, ConfigAxes& axes);

// Why the config's blocks are none that the spec allows; empty if they are.
std::string not_fixed_blocks(const AttentionSpec& spec, const Target& target, const KernelConfig& config);

}  // namespace flashjit
