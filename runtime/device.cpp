#include <algorithm>
#include <charconv>

#include "runtime/flashjit.hpp"

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

Tensor Tensor::contiguous(void* data, DType dtype, Device device, std::initializer_list<std::int64_t> shape) {
  if (shape.size() > 4) throw Error(ErrorCode::invalid_argument, "a tensor has at most 4 dimensions");
  Tensor t{.data = data, .dtype = dtype, .device = device, .rank = static_cast<int>(shape.size())};
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

const char* to_string(Origin origin) noexcept {
  switch (origin) {
    case Origin::memory:
      return "memory";
    case Origin::disk:
      return "disk";
    case Origin::compiled:
      return "compiled";
  }
  return "unknown";
}

}  // namespace flashjit
