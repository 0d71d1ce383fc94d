// Whether outputs would be written over each other, or over inputs: from strides and addresses alone.
#pragma once

#include "runtime/flashjit.hpp"

namespace flashjit {

// Throws invalid_argument where two elements of an output may share memory: dimensions do not lie within one
// another.
void require_distinct_rows(const char* name, const Tensor& output);

// Throws invalid_argument where it is certain that both have an element in common: AttentionArgs says when.
void require_apart(const char* name, const Tensor& output, const char* input_name, const Tensor& input);

}  // namespace flashjit
