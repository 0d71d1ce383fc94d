// The model of a device.
#pragma once

#include <string>

#include "runtime/flashjit.hpp"

namespace flashjit {

// The product name: "Intel(R) Xeon(R) ...", "NVIDIA H200".
// Throws target_unavailable for a GPU that is not there.
std::string device_model(Device device);

}  // namespace flashjit
