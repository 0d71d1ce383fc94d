// Finds outputs that overlap themselves or inputs, from strides and addresses alone.
#pragma once

#include "runtime/flashjit.hpp"

namespace flashjit {

// Throws invalid_argument if two elements of an output might share
// memory because its dimensions do not lie within one another.
void require_distinct_rows(const char* name, const Tensor& output);

// Throws invalid_argument if something that a launch writes certainly shares an element with another tensor
// of the launch; AttentionArgs says when that is found. The table of arguments says what is written. All
// tensors have been checked by themselves. workspace: the bytes of it that the launch uses; null for none.
void require_outputs_apart(const AttentionSpec& spec, const AttentionArgs& args, const Tensor* workspace);

// Whether the addresses of two tensors, from the first to the last, overlap. If not, they share no memory.
bool share_addresses(const Tensor& a, const Tensor& b);

}  // namespace flashjit
