// The operations that there are.
#pragma once

#include "runtime/operation.hpp"

namespace flashjit {

extern const OperationRuntime forward_runtime;

}  // namespace flashjit
