#include "tools/command/devices.hpp"

#include <sstream>

#include "runtime/compiler.hpp"
#include "runtime/cuda/driver.hpp"
#include "tools/command/progress.hpp"

namespace flashjit::command {

namespace {

// Whether kernels compile and run on the device. If not, stderr says why.
bool usable(Device device) {
  try {
    Engine engine({.device = device.str(), .cache_dir = ""});
    compiler_for(engine.target());
    return true;
  } catch (const Error& error) {
    tell_progress("flashjit: " + device.str() + " is left out: " + error.message());
    return false;
  }
}

}  // namespace

std::vector<Device> parse_devices(const std::string& text) {
  std::vector<Device> devices;
  if (text == "all") {
    devices.push_back({Device::Kind::cpu, 0});
    for (const CudaDevice& gpu : cuda_devices()) devices.push_back({Device::Kind::cuda, gpu.index});
    std::erase_if(devices, [](Device device) { return !usable(device); });
    if (devices.empty())
      throw Error(ErrorCode::target_unavailable, "kernels run on no device of this machine");
    return devices;
  }
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) devices.push_back(Device::parse(name));
  if (devices.empty()) devices.push_back(Device::parse(text));
  return devices;
}

}  // namespace flashjit::command
