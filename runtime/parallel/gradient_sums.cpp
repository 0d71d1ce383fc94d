#include "runtime/parallel/gradient_sums.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {

PartSums::PartSums(Engine& engine, const AttentionSpec& backward, const Shape& shape)
    : engine_(engine), shape_(shape) {
  for (const DType dtype : {DType::fp32, backward.grad_dtype.value_or(backward.dtype)})
    for (const int head_dim : {backward.head_dim, backward.head_dim_v}) kernel(dtype, head_dim);
}

const Kernel& PartSums::kernel(DType dtype, int head_dim) const {
  AttentionSpec spec;
  spec.op = Operation::merge;
  spec.dtype = dtype;
  spec.head_dim = spec.head_dim_v = head_dim;
  spec.sum = true;
  return engine_.get(spec, shape_);
}

void PartSums::add(const Tensor& to, const std::vector<Tensor>& parts, Stream stream) const {
  // A launch takes parts of equal strides.
  if (parts.size() == 2 && to.shape[0] > 1 && parts[0].strides[0] != parts[1].strides[0]) {
    for (std::int64_t i = 0; i < to.shape[0]; ++i)
      add(part_of(to, 0, i, 1), {part_of(parts[0], 0, i, 1), part_of(parts[1], 0, i, 1)}, stream);
    return;
  }
  Tensor all = parts.empty() ? to : parts[0];
  all.dtype = DType::fp32;
  for (int i = all.rank++; i > 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    all.shape[at] = all.shape[at - 1];
    all.strides[at] = all.strides[at - 1];
  }
  all.shape[0] = static_cast<std::int64_t>(parts.size());
  all.strides[0] = parts.size() < 2
                       ? 0
                       : (static_cast<std::byte*>(parts[1].data) - static_cast<std::byte*>(parts[0].data)) /
                             static_cast<std::int64_t>(sizeof(float));
  kernel(to.dtype, static_cast<int>(to.shape[3])).launch({.o = to, .parts_o = all}, stream);
}

GradientSums::GradientSums(const PartSums& sums, std::vector<Tensor> first, std::vector<Tensor> later,
                           int units, int length)
    : sums_(sums), buffers_{std::move(first), std::move(later)}, length_(length) {
  later_units_ = length == 0 ? units : static_cast<int>(buffers_[1][0].shape[1] / length);
  for (std::vector<char>& written : written_) written.resize(static_cast<std::size_t>(units));
}

std::vector<Tensor> GradientSums::target(int first, int count, Stream stream) {
  const int buffer = any(first, count) ? 1 : 0;
  if (buffer == 1) {
    if (later_units_ < units()) settle_all(stream), later_begin_ = first;
    for (int unit = first; unit < first + count; ++unit) settle(unit, stream);
  }
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < buffers_[0].size(); ++i) tensors.push_back(of(buffer, i, first, count));
  std::fill_n(written_[buffer].begin() + first, count, char{1});
  return tensors;
}

std::vector<Tensor> GradientSums::parts(int unit, std::size_t tensor) const {
  std::vector<Tensor> found;
  for (const int buffer : {0, 1})
    if (any(buffer, unit, 1)) found.push_back(of(buffer, tensor, unit, 1));
  return found;
}

void GradientSums::settle(int unit, Stream stream) {
  if (!any(1, unit, 1)) return;
  for (std::size_t i = 0; i < buffers_[0].size(); ++i) sums_.add(of(0, i, unit, 1), parts(unit, i), stream);
  written_[0][static_cast<std::size_t>(unit)] = 1;
  written_[1][static_cast<std::size_t>(unit)] = 0;
}

void GradientSums::settle_all(Stream stream) {
  for (int unit = 0; unit < units(); ++unit) settle(unit, stream);
}

Tensor GradientSums::of(int buffer, std::size_t tensor, int first, int count) const {
  const int place = buffer == 1 ? first - later_begin_ : first;
  return part_of(buffers_[buffer][tensor], 1, std::int64_t{place} * length_, std::int64_t{count} * length_);
}
bool GradientSums::any(int buffer, int first, int count) const {
  const auto begin = written_[buffer].begin() + first;
  return std::find(begin, begin + count, char{1}) != begin + count;
}

}  // namespace flashjit
