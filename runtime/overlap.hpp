// Finds outputs that overlap themselves or inputs, from strides and addresses alone.
#pragma once

#include <initializer_list>
#include <utility>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Throws invalid_argument if two elements of an output might share
// memory because its dimensions do not lie within one another.
void require_distinct_rows(const char* name, const Tensor& output);

// Throws invalid_argument if the output certainly shares an element
// with one of the inputs; AttentionArgs says when that is found.
void require_apart(const char* name, const Tensor& output,
                   std::initializer_list<std::pair<const char*, const Tensor*>> inputs);

}  // namespace flashjit
