#include "tools/command/devices.hpp"

#include <fstream>
#include <sstream>

#include "runtime/cuda/driver.hpp"

namespace flashjit::command {

std::vector<Device> parse_devices(const std::string& text) {
  std::vector<Device> devices;
  if (text == "all") {
    devices.push_back({Device::Kind::cpu, 0});
    for (const CudaDevice& gpu : cuda_devices()) devices.push_back({Device::Kind::cuda, gpu.index});
    return devices;
  }
  std::istringstream names(text);
  for (std::string name; std::getline(names, name, ',');) devices.push_back(Device::parse(name));
  if (devices.empty()) devices.push_back(Device::parse(text));
  return devices;
}

std::string model_name(Device device) {
  if (device.kind == Device::Kind::cuda) return cuda_device(device.index).name;
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "this machine's CPU";
}

}  // namespace flashjit::command
