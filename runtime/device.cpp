#include "runtime/device.hpp"

#include <cpuid.h>
#include <algorithm>
#include <charconv>
#include <cstring>

#include "runtime/cuda/driver.hpp"

namespace flashjit {

Device Device::parse(std::string_view text) {
  if (text == "cpu") return {Kind::cpu, 0};
  if (text == "cuda") return {Kind::cuda, 0};
  if (text.starts_with("cuda:")) {
    const std::string_view number = text.substr(5);
    Device device{Kind::cuda, 0};
    const auto [end, failed] = std::from_chars(number.begin(), number.end(), device.index);
    if (failed == std::errc{} && end == number.end() && device.index >= 0) return device;
  }
  throw Error(ErrorCode::invalid_argument,
              "device \"" + std::string(text) + "\" is not known: it is \"cpu\" or \"cuda:N\"");
}

std::string device_model(Device device) {
  if (device.kind == Device::Kind::cuda) return cuda_device(device.index).name;
  // The CPU's brand string: 48 characters in three leaves, padded with blanks or zeros.
  char brand[49] = {};
  for (unsigned leaf = 0; leaf < 3; ++leaf) {
    unsigned registers[4];
    if (!__get_cpuid(0x80000002 + leaf, &registers[0], &registers[1], &registers[2], &registers[3])) break;
    std::memcpy(brand + 16 * leaf, registers, sizeof registers);
  }
  const std::string name = brand;
  const std::size_t first = name.find_first_not_of(' ');
  if (first == std::string::npos) return "this machine's CPU";
  return name.substr(first, name.find_last_not_of(' ') + 1 - first);
}

Tensor Tensor::contiguous(void* data, DType dtype, Device device, std::span<const std::int64_t> shape) {
  if (shape.size() > max_rank)
    throw Error(ErrorCode::invalid_argument,
                "a tensor has at most " + std::to_string(max_rank) + " dimensions");
  Tensor t{.data = data, .dtype = dtype, .device = device, .rank = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  std::uint64_t stride = 1;  // may wrap: whoever counts the elements refuses such a shape
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(t.shape[i]);
  }
  return t;
}

const char* to_string(Origin origin) noexcept {
  switch (origin) {
    case Origin::memory:
      return "memory";
    case Origin::disk:
      return "disk";
    case Origin::remote:
      return "remote";
    case Origin::compiled:
      return "compiled";
  }
  return "unknown";
}

const char* to_string(ConfigSource source) noexcept {
  switch (source) {
    case ConfigSource::heuristic:
      return "heuristic";
    case ConfigSource::record:
      return "record";
    case ConfigSource::first_guess:
      return "first_guess";
    case ConfigSource::pinned:
      return "pinned";
  }
  return "unknown";
}

const char* to_string(TuneStage stage) noexcept {
  switch (stage) {
    case TuneStage::waiting:
      return "waiting";
    case TuneStage::building:
      return "building";
    case TuneStage::checking:
      return "checking";
    case TuneStage::measuring:
      return "measuring";
  }
  return "unknown";
}

}  // namespace flashjit
