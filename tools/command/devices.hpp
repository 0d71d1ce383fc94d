// Reads the --device option.
#pragma once

#include <string>
#include <vector>

#include "runtime/device.hpp"

namespace flashjit::command {

// The devices that the text names, separated by commas: "cpu", "cuda:0", .... "all" means the CPU and every
// GPU on which kernels run; stderr names the devices left out, with the reason.
std::vector<Device> parse_devices(const std::string& text);
}  // namespace flashjit::command
