// Tensors with traps around them: memory before, after and between the elements is poisoned (NaN or infinity)
// and must be as it was after a launch. On a CPU an unmapped page follows the last element or precedes the
// first, so that a single byte read outside ends the test.
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

// How the elements of [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim], lie in memory.
enum class MemoryLayout {
  contiguous,
  heads_first,   // [batch, heads, seqlen, head_dim] underneath
  batch_inside,  // [seqlen, batch, heads, head_dim] underneath
  padded,        // gaps after every head, row and batch entry
  sliced_heads,  // every other head of a tensor with twice as many
  odd,           // strides that are multiples of nothing; for CPUs
};
TensorShape arrange(MemoryLayout layout, const std::vector<std::int64_t>& shape);

class GuardedTensor {
 public:
  enum class Fence { before, after };

  // Poisoned throughout.
  GuardedTensor(TestDevice& device, DType dtype, const TensorShape& shape, Poison poison, Fence fence);
  ~GuardedTensor();
  GuardedTensor(const GuardedTensor&) = delete;
  GuardedTensor& operator=(const GuardedTensor&) = delete;

  // What belongs to the elements, if it is less than the tensor: the others are surroundings.
  void limit_elements(const TensorShape& shape) { elements_ = shape; }

  // To fill, and to look at after download().
  Tensor on_host() const;
  // What the kernel gets. On a CPU the same memory.
  Tensor on_device() const;

  // Host to device; what was_not_touched compares with.
  void upload();
  void download();
  // Poisons the elements again, on the device too.
  void poison_elements();

  // No byte differs from the last upload; `but_elements`: except those of the elements.
  testing::AssertionResult was_not_touched(const char* name, bool but_elements) const;
  // The elements' bytes, row by row.
  std::vector<std::byte> elements() const;

 private:
  template <class F>
  void for_each_row(F&& body) const;  // body(byte offset of the row in storage, bytes)

  TestDevice& device_;
  DType dtype_;
  TensorShape shape_, elements_;
  Poison poison_;
  std::byte* mapping_ = nullptr;  // fence, storage, fence
  std::size_t mapped_ = 0;
  std::byte* storage_ = nullptr;
  std::size_t size_ = 0;    // of the storage
  std::size_t offset_ = 0;  // of the first element in it
  std::vector<std::byte> before_;
  cuda::DeviceBuffer buffer_;
};

}  // namespace flashjit::testing_support
