// The devices of this machine, by name.
#pragma once

#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::command {

// "cpu", "cuda:0", ...: those of the text, separated by commas. "all": the CPU and every GPU where kernels
// run; those left out are named on stderr with the reason.
std::vector<Device> parse_devices(const std::string& text);
// What the maker calls it: "Intel(R) Xeon(R) ...", "NVIDIA H200".
std::string model_name(Device device);

}  // namespace flashjit::command
