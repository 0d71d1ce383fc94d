#include "runtime/argument_checks.hpp"

#include <climits>
#include <span>

#include "runtime/cuda/memory.hpp"

namespace flashjit {

std::string shape_text(const Tensor& t) {
  std::string s = "[";
  for (int i = 0; i < t.rank; ++i) s += (i ? ", " : "") + std::to_string(t.shape[i]);
  return s + "]";
}

const Tensor& require(const char* name, const std::optional<Tensor>& given, DType dtype, int rank,
                      const char* layout, Device device) {
  if (!given) refuse(name, " is missing: this kernel needs it, ", layout);
  const Tensor& t = *given;
  if (t.rank != rank)
    refuse(name, " has rank ", t.rank, ", this kernel takes ", rank, " dimensions, ", layout);
  if (t.dtype != dtype)
    refuse(name, " has dtype ", to_string(t.dtype), ", this kernel takes ", to_string(dtype));
  if (t.device != device)
    refuse(name, " is on ", t.device.str(), ", this kernel runs on ", device.str(),
           ": copy the tensor there");
  bool has_elements = true;
  for (int i = 0; i < rank; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > INT_MAX)
      refuse(name, " has shape ", shape_text(t), ": every size must be between 0 and 2147483647");
    has_elements = has_elements && t.shape[i] > 0;
  }
  if (!product_of(std::span(t.shape).first(static_cast<std::size_t>(rank))))
    refuse(name, " has shape ", shape_text(t), ": more elements than 64 bits count");
  if (has_elements && !t.data) refuse(name, " has a null data pointer but shape ", shape_text(t));
  // Asks the driver where it really is: 40 ns, against a fault that takes the host's context with it.
  if (has_elements && device.kind == Device::Kind::cuda)
    cuda::check_device_pointer(t.data, device.index, name);
  return t;
}

void require_shape(const char* name, const Tensor& t, int dim, std::int64_t expected, const char* what) {
  if (t.shape[dim] != expected)
    refuse(name, " has shape ", shape_text(t), ": dimension ", dim, " must be ", expected, ", ", what);
}

void require_table(const char* name, const Tensor& t) {
  std::int64_t stride = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.strides[i] != stride) refuse(name, " must be contiguous");
    stride *= t.shape[i];
  }
  const std::size_t bytes = size_of(t.dtype);
  if (reinterpret_cast<std::uintptr_t>(t.data) % bytes)
    refuse(name, "'s data pointer is not aligned to ", bytes, " bytes");
}

}  // namespace flashjit
