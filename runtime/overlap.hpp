// Whether outputs would be written over each other, or over inputs: from strides and addresses alone.
#pragma once

#include <initializer_list>
#include <utility>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Throws invalid_argument where two elements of an output may share memory: dimensions do not lie within one
// another.
void require_distinct_rows(const char* name, const Tensor& output);

// Throws invalid_argument where it is certain that the output has an element in common with one of the
// inputs: AttentionArgs says when.
void require_apart(const char* name, const Tensor& output,
                   std::initializer_list<std::pair<const char*, const Tensor*>> inputs);

}  // namespace flashjit
