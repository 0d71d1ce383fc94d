// AttentionArgs -> the params that device code sees, or a clear refusal.
#pragma once

#include <cstdint>

#include "runtime/flashjit.hpp"
#include "templates/shared/forward_params.h"

namespace flashjit {

struct CheckedArguments {
  device::ForwardParams params{};
  Shape shape{};
  bool empty = false;  // no query row: nothing to launch
};

// Throws invalid_argument naming the argument. Touches no tensor memory but that of lengths and lists: on a
// CPU, and where FLASHJIT_CHECK=1 asks for it.
CheckedArguments check_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args);

}  // namespace flashjit
