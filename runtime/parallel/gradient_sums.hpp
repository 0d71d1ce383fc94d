// Float32 sums of gradients that several launches have a part of.
#pragma once

#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit {

// Adds parts of dq, dk and dv.
class PartSums {
 public:
  // Loads the kernels for gradients of this backward and sizes like these.
  PartSums(Engine& engine, const AttentionSpec& backward, const Shape& shape);
  // to = parts[0] + parts[1] + ..., of at most two, which are float32; of none: zeros. `to` may be parts[0].
  void add(const Tensor& to, const std::vector<Tensor>& parts, Stream stream) const;

 private:
  const Kernel& kernel(DType dtype, int head_dim) const;

  Engine& engine_;
  const Shape shape_;
};

// Gradients of units, which lie side by side along the sequence: rows of q, or keys. A launch writes to one
// of two buffers; a second one to the other, before the two are added.
class GradientSums {
 public:
  // `buffers`: two of each tensor, [batch, units * length, heads, head_dim].
  GradientSums(const PartSums& sums, std::vector<std::vector<Tensor>> buffers, int units, int length);

  // Where a launch writes the gradients of units [first, first + count), by tensor.
  std::vector<Tensor> target(int first, int count, Stream stream);
  // What there is of a unit's gradient of a tensor: at most two parts.
  std::vector<Tensor> parts(int unit, std::size_t tensor) const;
  // Makes it one part at most.
  void settle(int unit, Stream stream);

 private:
  Tensor of(int buffer, std::size_t tensor, int first, int count) const;
  bool any(int buffer, int first, int count) const;

  const PartSums& sums_;
  std::vector<std::vector<Tensor>> buffers_;
  int length_;
  std::vector<char> written_[2];  // by unit
};

}  // namespace flashjit
