// The runtime of every operation.
#pragma once

#include "runtime/operation.hpp"

namespace flashjit {

extern const OperationRuntime forward_runtime;
extern const OperationRuntime decode_runtime;
extern const OperationRuntime merge_runtime;

}  // namespace flashjit
