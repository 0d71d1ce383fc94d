// What a device is.
#pragma once

#include <string>

#include "runtime/flashjit.hpp"

namespace flashjit {

// What its maker calls it: "Intel(R) Xeon(R) ...", "NVIDIA H200". Throws target_unavailable for a GPU that is
// not there.
std::string device_model(Device device);

}  // namespace flashjit
