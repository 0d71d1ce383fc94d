#include "runtime/operation.hpp"

#include <cstdint>
#include <string>

#include "runtime/arguments/checks.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/operations/operations.hpp"

namespace flashjit {

const OperationRuntime& runtime_of(Operation op) {
#define FLASHJIT_RUNTIME(name) &name##_runtime,
  static constexpr const OperationRuntime* runtimes[] = {FLASHJIT_FOR_EACH_OPERATION(FLASHJIT_RUNTIME)};
#undef FLASHJIT_RUNTIME
  return *runtimes[static_cast<std::size_t>(info_of(op).op)];
}

void* require_workspace(const std::optional<Tensor>& given, std::size_t bytes, Device device) {
  if (bytes == 0) return nullptr;
  if (!given)
    refuse_argument(
        "workspace is missing: this launch needs ", bytes,
        " bytes; Kernel::workspace_bytes(shape) says how many serve a shape and all smaller ones");
  const Tensor& t = *given;
  if (t.device != device)
    refuse_argument("workspace is on ", t.device.str(), ", this kernel runs on ", device.str(),
                    ": allocate it there");
  if (t.rank < 1 || t.rank > static_cast<int>(t.shape.size()))
    refuse_argument("workspace has rank ", t.rank, ", it must have 1 to ", t.shape.size(), " dimensions");
  std::int64_t elements = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] < 0) refuse_argument("workspace has shape ", shape_text(t), ": no size may be negative");
    if (t.shape[i] > 1 && t.strides[i] != elements) refuse_argument("workspace must be contiguous");
    if (__builtin_mul_overflow(elements, t.shape[i], &elements))
      refuse_argument("workspace has shape ", shape_text(t), ": more elements than 64 bits count");
  }
  const std::size_t has = static_cast<std::size_t>(elements) * size_of(t.dtype);
  if (has < bytes)
    refuse_argument("workspace has ", has, " bytes, this launch needs ", bytes,
                    ": Kernel::workspace_bytes(shape) says how many serve a shape and all smaller ones");
  if (!t.data) refuse_argument("workspace has a null data pointer but shape ", shape_text(t));
  const bool cuda = device.kind == Device::Kind::cuda;
  const std::size_t alignment = cuda ? 256 : 64;
  if (reinterpret_cast<std::uintptr_t>(t.data) % alignment)
    refuse_argument("workspace's data pointer is not aligned to ", alignment, " bytes");
  if (cuda) cuda::check_device_pointer(t.data, device.index, "workspace");
  return t.data;
}

}  // namespace flashjit
