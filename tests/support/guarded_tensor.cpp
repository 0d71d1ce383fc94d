#include "tests/support/guarded_tensor.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>

#include "tools/verify/element.hpp"

namespace flashjit::testing_support {
namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t guard = 512;  // poisoned bytes on either side of the elements on a GPU

void fill_poison(std::byte* begin, std::size_t bytes, DType dtype, Poison poison) {
  const float value = poison == Poison::nan ? std::numeric_limits<float>::quiet_NaN()
                                            : std::numeric_limits<float>::infinity();
  if (size_of(dtype) == 1 || dtype == DType::int64) {
    std::memset(begin, 0x5a, bytes);
    return;
  }
  const DType floating = dtype == DType::int32 ? DType::fp32 : dtype;
  for (std::size_t i = 0; i < bytes / size_of(dtype); ++i) {
    verify::store_element(begin, floating, static_cast<std::int64_t>(i), value);
  }
}

}  // namespace

TensorShape arrange(MemoryLayout layout, const std::vector<std::int64_t>& shape, DType dtype) {
  TensorShape t;
  t.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape.begin());
  const std::int64_t dim = shape.back(), heads = shape[shape.size() - 2], rows = shape[shape.size() - 3];
  const std::int64_t batch = t.rank == 4 ? shape[0] : 1;
  std::int64_t of_batch = rows * heads * dim, of_row = heads * dim, of_head = dim;
  switch (layout) {
    case MemoryLayout::contiguous:
      break;
    case MemoryLayout::heads_first:
      of_row = dim;
      of_head = rows * dim;
      break;
    case MemoryLayout::batch_inside:
      of_batch = heads * dim;
      of_row = batch * of_batch;
      break;
    case MemoryLayout::padded: {
      const std::int64_t unit = size_of(dtype) == 1 ? 16 : 8;
      of_head = (dim + unit - 1) / unit * unit + unit;
      of_row = heads * of_head + 2 * unit;
      of_batch = (rows + 3) * of_row + unit;
      break;
    }
    case MemoryLayout::sliced_heads:
      of_head = 2 * dim;
      of_row = 2 * heads * dim;
      of_batch = rows * of_row;
      break;
    case MemoryLayout::odd:
      of_head = dim + 1;
      of_row = heads * of_head + 3;
      of_batch = (rows + 1) * of_row + 5;
  }
  if (t.rank == 4) {
    t.strides = {of_batch, of_row, of_head, 1};
  } else {
    t.strides = {of_row, of_head, 1};
  }
  return t;
}

GuardedTensor::GuardedTensor(TestDevice& device, DType dtype, const TensorShape& shape, Poison poison,
                             Fence fence)
    : device_(device), dtype_(dtype), shape_(shape), elements_(shape), poison_(poison) {
  const std::size_t width = size_of(dtype);
  std::size_t bytes = 0;  // from the first element to the end of the last
  if (std::all_of(shape.shape.begin(), shape.shape.begin() + shape.rank,
                  [](std::int64_t n) { return n > 0; })) {
    bytes = width;
    for (int i = 0; i < shape.rank; ++i)
      bytes += width * static_cast<std::size_t>((shape.shape[i] - 1) * shape.strides[i]);
  }
  const std::size_t inner = (bytes + 2 * guard + page - 1) / page * page;
  mapped_ = inner + 2 * page;
  void* mapping = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  mprotect(mapping_, page, PROT_NONE);
  mprotect(mapping_ + page + inner, page, PROT_NONE);
  storage_ = mapping_ + page;
  size_ = inner;
  if (device.is_cuda()) {
    offset_ = guard;
    buffer_ = cuda::DeviceBuffer(device.context(), size_);
  } else {
    offset_ = fence == Fence::before ? 0 : inner - bytes;
  }
  fill_poison(storage_, size_, dtype, poison);
}

GuardedTensor::~GuardedTensor() {
  munmap(mapping_, mapped_);
}

Tensor GuardedTensor::on_host() const {
  Tensor t;
  t.data = storage_ + offset_;
  t.dtype = dtype_;
  t.device = device_.device();
  t.rank = shape_.rank;
  t.shape = shape_.shape;
  t.strides = shape_.strides;
  return t;
}

Tensor GuardedTensor::on_device() const {
  Tensor t = on_host();
  if (device_.is_cuda()) t.data = static_cast<std::byte*>(buffer_.data()) + offset_;
  return t;
}

void GuardedTensor::upload() {
  before_.assign(storage_, storage_ + size_);
  if (device_.is_cuda()) buffer_.copy_from(storage_, size_);
}

void GuardedTensor::download() {
  if (device_.is_cuda()) {
    buffer_.copy_to(storage_, size_);
    device_.synchronize();
  }
}

void GuardedTensor::poison_elements() {
  for_each_row(
      [&](std::size_t at, std::size_t bytes) { fill_poison(storage_ + at, bytes, dtype_, poison_); });
  upload();
}

template <class F>
void GuardedTensor::for_each_row(F&& body) const {
  const int last = elements_.rank - 1;
  // Rows of one element where these lie apart.
  const int outer = elements_.strides[last] == 1 ? last : last + 1;
  std::int64_t rows = 1;
  for (int i = 0; i < outer; ++i) rows *= elements_.shape[i];
  const std::size_t width = size_of(dtype_);
  const std::size_t bytes = width * static_cast<std::size_t>(outer == last ? elements_.shape[last] : 1);
  if (bytes == 0) return;
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t at = 0;
    for (std::int64_t i = outer - 1, rest = row; i >= 0; rest /= elements_.shape[i], --i) {
      at += rest % elements_.shape[i] * elements_.strides[i];
    }
    body(offset_ + width * static_cast<std::size_t>(at), bytes);
  }
}

testing::AssertionResult GuardedTensor::was_not_touched(const char* name, bool but_elements) const {
  std::vector<std::byte> now(storage_, storage_ + size_);
  if (but_elements) {
    for_each_row([&](std::size_t at, std::size_t bytes) { std::memcpy(&now[at], &before_[at], bytes); });
  }
  const auto [a, b] = std::mismatch(now.begin(), now.end(), before_.begin());
  if (a == now.end()) return testing::AssertionSuccess();
  return testing::AssertionFailure() << name << ": byte "
                                     << (a - now.begin()) - static_cast<std::ptrdiff_t>(offset_)
                                     << " from its first element was written";
}

std::vector<std::byte> GuardedTensor::elements() const {
  std::vector<std::byte> out;
  for_each_row([&](std::size_t at, std::size_t bytes) {
    out.insert(out.end(), storage_ + at, storage_ + at + bytes);
  });
  return out;
}

}  // namespace flashjit::testing_support
