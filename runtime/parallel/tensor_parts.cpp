#include "runtime/parallel/tensor_parts.hpp"

#include <cstdint>
#include <cstring>

namespace flashjit {

Tensor part_of(const Tensor& t, int dim, std::int64_t begin, std::int64_t count) {
  Tensor part = t;
  const auto at = static_cast<std::size_t>(dim);
  part.data =
      static_cast<std::byte*>(t.data) + begin * t.strides[at] * static_cast<std::int64_t>(size_of(t.dtype));
  part.shape[at] = count;
  return part;
}

Tensor at_of(const Tensor& t, int dim, std::int64_t index) {
  Tensor one = part_of(t, dim, index, 1);
  for (int i = dim; i + 1 < t.rank; ++i) {
    one.shape[static_cast<std::size_t>(i)] = t.shape[static_cast<std::size_t>(i + 1)];
    one.strides[static_cast<std::size_t>(i)] = t.strides[static_cast<std::size_t>(i + 1)];
  }
  --one.rank;
  return one;
}

std::vector<Block> blocks_of(const Tensor& to, const Tensor& from) {
  // Dimensions of more than one index, innermost first; those that lie side by side in both are one.
  struct Dimension {
    std::int64_t size, to, from;  // strides in bytes
  };
  const auto bytes = static_cast<std::int64_t>(size_of(to.dtype));
  std::vector<Dimension> dims;
  for (int i = to.rank - 1; i >= 0; --i) {
    const auto at = static_cast<std::size_t>(i);
    if (to.shape[at] == 0) return {};
    if (to.shape[at] == 1) continue;
    const Dimension next{to.shape[at], to.strides[at] * bytes, from.strides[at] * bytes};
    Dimension* const last = dims.empty() ? nullptr : &dims.back();
    if (last && next.to == last->to * last->size && next.from == last->from * last->size)
      last->size *= next.size;
    else
      dims.push_back(next);
  }
  Block block{
      static_cast<std::byte*>(to.data), static_cast<const std::byte*>(from.data), bytes, 1, bytes, bytes};
  std::size_t used = 0;
  if (used < dims.size() && dims[used].to == bytes && dims[used].from == bytes)
    block.width = block.to_pitch = block.from_pitch = bytes * dims[used++].size;
  if (used < dims.size())
    block.height = dims[used].size, block.to_pitch = dims[used].to, block.from_pitch = dims[used].from,
    ++used;
  std::vector<Block> all = {block};
  for (; used < dims.size(); ++used) {
    const std::size_t count = all.size();
    for (std::int64_t i = 1; i < dims[used].size; ++i)
      for (std::size_t k = 0; k < count; ++k) {
        Block next = all[k];
        next.to += i * dims[used].to;
        next.from += i * dims[used].from;
        all.push_back(next);
      }
  }
  return all;
}

void copy_elements(const Tensor& to, const Tensor& from) {
  for (const Block& block : blocks_of(to, from))
    for (std::int64_t row = 0; row < block.height; ++row)
      std::memcpy(block.to + row * block.to_pitch, block.from + row * block.from_pitch,
                  static_cast<std::size_t>(block.width));
}

}  // namespace flashjit
