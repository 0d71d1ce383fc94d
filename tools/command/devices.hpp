// Which devices of this machine are meant.
#pragma once

#include <string>
#include <vector>

#include "runtime/device.hpp"

namespace flashjit::command {

// "cpu", "cuda:0", ...: those of the text, separated by commas. "all": the CPU and every GPU where kernels
// run; those left out are named on stderr with the reason.
std::vector<Device> parse_devices(const std::string& text);
}  // namespace flashjit::command
