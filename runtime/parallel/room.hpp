// Tensors in memory that a caller gives as one piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/arguments/checks.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// Takes tensors one after the other. Without memory it counts.
class Room {
 public:
  static constexpr std::size_t alignment = 64;

  explicit Room(Device device, void* memory = nullptr)
      : data_(static_cast<std::byte*>(memory)), device_(device) {}
  // Takes a caller's workspace, which has the needed bytes.
  Room(const std::optional<Tensor>& workspace, std::size_t needed, Device device) : device_(device) {
    if (needed == 0) return;
    const std::size_t given =
        workspace ? static_cast<std::size_t>(workspace->shape[0]) * size_of(workspace->dtype) : 0;
    if (!workspace || !workspace->data || given < needed)
      refuse_argument("workspace has ", given, " bytes, the launch needs ", needed,
                      ", as workspace_bytes() says");
    if (reinterpret_cast<std::uintptr_t>(workspace->data) % alignment)
      refuse_argument("workspace's data pointer is not aligned to ", alignment, " bytes");
    data_ = static_cast<std::byte*>(workspace->data);
  }

  Tensor take(DType dtype, const std::vector<std::int64_t>& sizes) {
    std::size_t bytes = size_of(dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    return Tensor::contiguous(take(bytes), dtype, device_, sizes);
  }
  std::optional<Tensor> take_workspace(std::size_t bytes) {
    if (bytes == 0) return std::nullopt;
    return Tensor::contiguous(take(bytes), DType::uint8, device_, {static_cast<std::int64_t>(bytes)});
  }
  std::size_t used() const { return used_; }

 private:
  void* take(std::size_t bytes) {
    std::byte* const at = data_ ? data_ + used_ : nullptr;
    used_ += (bytes + alignment - 1) / alignment * alignment;
    return at;
  }
  std::byte* data_ = nullptr;
  std::size_t used_ = 0;
  Device device_{};
};

}  // namespace flashjit
