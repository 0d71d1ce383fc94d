// The run-time data of a spec's masks: checked as far as the host sees it, and made into params.
#pragma once

#include "runtime/flashjit.hpp"
#include "templates/shared/params.h"

namespace flashjit {

// Fills the masks' part of `params`, whose sizes are known. Throws invalid_argument for what is missing, does
// not fit, or belongs to a mask that the spec has not. Touches no tensor memory.
void check_mask_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args,
                          device::ProblemParams& params);

// What lies in the tensors of lengths, lists and prefixes: throws invalid_argument for the first wrong number
// with its place. All pointers of `params` are the host's.
void check_lengths_and_lists(const AttentionSpec& spec, const device::ProblemParams& params);

// The same for pointers to the memory of a GPU: waits for it and copies what is to be checked.
void check_lengths_and_lists_on(Device device, const AttentionSpec& spec,
                                const device::ProblemParams& params);

}  // namespace flashjit
