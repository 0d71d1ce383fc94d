// Checks AttentionArgs and converts them to the params that device code reads.
#pragma once

#include <cstdint>

#include "runtime/flashjit.hpp"
#include "templates/shared/forward_params.h"

namespace flashjit {

struct CheckedArguments {
  device::ForwardParams params{};
  Shape shape{};
  bool empty = false;  // no query rows: nothing to launch
};

// Throws invalid_argument; the message names the argument. Reads no tensor memory,
// except tables of lengths and lists: always on a CPU, on a GPU if FLASHJIT_CHECK=1.
CheckedArguments check_arguments(const AttentionSpec& spec, Device device, const AttentionArgs& args);

}  // namespace flashjit
