// A child that compiles a stranger's spec may compute, write to the socket it has, and end.
#pragma once

#include "tools/serve/nursery.hpp"

namespace flashjit::serve {

// For good. Throws std::system_error if this system cannot do it.
void enter_sandbox(const ChildLimits& limits);

}  // namespace flashjit::serve
