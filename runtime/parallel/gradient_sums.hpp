// Float32 sums of gradients that several launches have a part of.
#pragma once

#include <algorithm>
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

// Gradients of units, which lie side by side along the sequence: rows of q, or keys. A first launch writes to
// a buffer, a later one to another, before the two are added.
class GradientSums {
 public:
  // `first`: [batch, units * length, heads, head_dim] of each tensor; `later`: the same, or of fewer units.
  GradientSums(const PartSums& sums, std::vector<Tensor> first, std::vector<Tensor> later, int units,
               int length);

  // How many of these units a launch may write at a time.
  int most(int first, int count) const { return any(first, count) ? std::min(count, later_units_) : count; }
  // Where a launch writes the gradients of units [first, first + count), by tensor.
  std::vector<Tensor> target(int first, int count, Stream stream);
  // The parts of a unit's gradient of a tensor that there are, at most two.
  std::vector<Tensor> parts(int unit, std::size_t tensor) const;
  // Makes it one part at most.
  void settle(int unit, Stream stream);
  void settle_all(Stream stream);

 private:
  Tensor of(int buffer, std::size_t tensor, int first, int count) const;
  bool any(int buffer, int first, int count) const;
  bool any(int first, int count) const { return any(0, first, count) || any(1, first, count); }
  int units() const { return static_cast<int>(written_[0].size()); }

  const PartSums& sums_;
  std::vector<Tensor> buffers_[2];
  int length_, later_units_;
  int later_begin_ = 0;           // the unit at the beginning of a later buffer of fewer units
  std::vector<char> written_[2];  // by unit
};

}  // namespace flashjit
