// Tensors with traps around them. Memory before, after and between the elements is poisoned
// (NaN or infinity) and must be unchanged after a launch. On a CPU an unmapped page follows
// the last element or precedes the first, so that reading a single byte outside ends the test.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"
#include "tests/support/test_device.hpp"

namespace flashjit::testing_support {

enum class Poison { nan, infinity };

struct TensorShape {
  int rank = 0;
  std::array<std::int64_t, Tensor::max_rank> shape{}, strides{};
};

// The layout of [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim], in memory.
enum class MemoryLayout {
  contiguous,
  heads_first,   // in memory [batch, heads, seqlen, head_dim]
  batch_inside,  // in memory [seqlen, batch, heads, head_dim]
  padded,        // gaps after every head, row and batch entry
  sliced_heads,  // every other head of a tensor with twice as many
  odd,           // strides that are no multiples of anything; only for CPUs
};
// `padded` has strides that are multiples of 16 bytes, as GPU kernels need.
TensorShape arrange(MemoryLayout layout, const std::vector<std::int64_t>& shape, DType dtype);

class GuardedTensor {
 public:
  enum class Fence { before, after };

  // All memory is poisoned.
  GuardedTensor(TestDevice& device, DType dtype, const TensorShape& shape, Poison poison, Fence fence);
  ~GuardedTensor();
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;

  // Limits the elements to a part of the tensor; the rest counts as surroundings.
  void limit_elements(const TensorShape& shape) { elements_ = shape; }

  // The tensor on the host: to be filled, and read after download().
  Tensor on_host() const;
  // The tensor that the kernel gets. On a CPU it is the same memory.
  Tensor on_device() const;

  // Copies the tensor to the device; was_not_touched() compares with this state.
  void upload();
  void download();
  // Poisons the elements again, also on the device.
  void poison_elements();

  // Whether all bytes are those of the last upload. `but_elements`: bytes of the elements may differ.
  testing::AssertionResult was_not_touched(const char* name, bool but_elements) const;
  // The elements' bytes, row by row.
  std::vector<std::byte> elements() const;

 private:
  template <class F>
  void for_each_row(F&& body) const;  // calls body(byte offset of the row in storage, bytes)

  TestDevice& device_;
  DType dtype_;
  TensorShape shape_, elements_;
  Poison poison_;
  std::byte* mapping_ = nullptr;  // fence, storage, fence
  std::size_t mapped_ = 0;
  std::byte* storage_ = nullptr;
  std::size_t size_ = 0;    // bytes of the storage
  std::size_t offset_ = 0;  // of the first element in the storage
  std::vector<std::byte> before_;
  cuda::DeviceBuffer buffer_;
};

}  // namespace flashjit::testing_support
