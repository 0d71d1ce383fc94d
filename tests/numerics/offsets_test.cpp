// Tensors whose elements lie more than 2^31 apart, in address space that costs
// only the touched pages. Also runs on a GPU if its memory can hold them.
#include <gtest/gtest.h>

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <limits>

#include "runtime/cuda/memory.hpp"
#include "tests/numerics/specs.hpp"
#include "tests/support/test_device.hpp"
#include "tools/verify/element.hpp"
#include "tools/verify/random_tensor.hpp"
#include "tools/verify/report.hpp"

namespace flashjit::testing_support {
namespace {

constexpr std::int64_t far = (std::int64_t{1} << 31) + 64;  // elements

// A tensor of zeros in host memory, whose pages exist only once touched; on a GPU also a copy in its memory.
class FarTensor {
 public:
  FarTensor(TestDevice& device, DType dtype, const std::vector<std::int64_t>& shape,
            const std::vector<std::int64_t>& strides)
      : device_(device) {
    tensor_.dtype = dtype;
    tensor_.device = device.device();
    tensor_.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), tensor_.shape.begin());
    std::copy(strides.begin(), strides.end(), tensor_.strides.begin());
    std::int64_t elements = 1;
    for (std::size_t i = 0; i < shape.size(); ++i) elements += (shape[i] - 1) * strides[i];
    bytes_ = static_cast<std::size_t>(elements) * size_of(dtype);
    tensor_.data =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (tensor_.data == MAP_FAILED) throw std::bad_alloc();
    if (device.is_cuda()) buffer_ = cuda::DeviceBuffer(device.context(), bytes_);
  }
  ~FarTensor() { munmap(tensor_.data, bytes_); }
  FarTensor(const FarTensor&) = delete;

  const Tensor& on_host() const { return tensor_; }
  Tensor on_device() const {
    Tensor t = tensor_;
    if (device_.is_cuda()) t.data = buffer_.data();
    return t;
  }
  void upload() { copy(true); }
  void download() { copy(false); }
  void fill(float value) {
    for_each_row([&](std::int64_t at, std::int64_t columns) {
      for (std::int64_t c = 0; c < columns; ++c)
        verify::store_element(tensor_.data, tensor_.dtype, at + c, value);
    });
  }

 private:
  template <class F>
  void for_each_row(F&& body) const {
    const Tensor& t = tensor_;
    for (std::int64_t i = 0; i < t.shape[0]; ++i) {
      for (std::int64_t j = 0; j < t.shape[1]; ++j) {
        for (std::int64_t k = 0; k < (t.rank == 4 ? t.shape[2] : 1); ++k) {
          body(i * t.strides[0] + j * t.strides[1] + (t.rank == 4 ? k * t.strides[2] : 0),
               t.shape[t.rank - 1]);
        }
      }
    }
  }
  void copy(bool up) {
    if (!device_.is_cuda()) return;
    const cuda::ContextScope scope(device_.context());
    const std::size_t width = size_of(tensor_.dtype);
    for_each_row([&](std::int64_t at, std::int64_t columns) {
      const auto host =
          reinterpret_cast<cuda::CUdeviceptr>(tensor_.data) + static_cast<std::size_t>(at) * width;
      const auto there =
          reinterpret_cast<cuda::CUdeviceptr>(buffer_.data()) + static_cast<std::size_t>(at) * width;
      const std::size_t bytes = static_cast<std::size_t>(columns) * width;
      cuda::check(cuda::driver().MemcpyAsync(up ? there : host, up ? host : there, bytes, nullptr),
                  "cuMemcpyAsync");
    });
    device_.synchronize();
  }

  TestDevice& device_;
  Tensor tensor_;
  std::size_t bytes_ = 0;
  cuda::DeviceBuffer buffer_;
};

class Offsets : public OnEveryDevice {
 protected:
  // q and o are [batch, seqlen_q, heads, 64]; k and v have the same strides.
  void expect(const std::vector<std::int64_t>& shape_q, const std::vector<std::int64_t>& shape_k,
              const std::vector<std::int64_t>& strides) {
    const AttentionSpec spec = forward_spec(DType::bf16, 64, {CausalMask{}}, {.lse = shape_q.size() == 4});
    if (on().is_cuda() && cuda::free_memory(on().context()) < std::size_t{64} << 30)
      GTEST_SKIP() << "needs 64 GiB of GPU memory";
    FarTensor q(on(), spec.dtype, shape_q, strides), k(on(), spec.dtype, shape_k, strides),
        v(on(), spec.dtype, shape_k, strides), o(on(), spec.dtype, shape_q, strides),
        lse(on(), DType::fp32, {shape_q[0], shape_q[2], shape_q[1]}, {shape_q[2] * far, far, 1});
    verify::fill_random(q.on_host(), 1);
    verify::fill_random(k.on_host(), 2);
    verify::fill_random(v.on_host(), 3);
    o.fill(std::numeric_limits<float>::quiet_NaN());
    lse.fill(std::numeric_limits<float>::quiet_NaN());
    AttentionArgs args;
    for (auto* t : {&q, &k, &v, &o, &lse}) t->upload();
    args.q = q.on_device(), args.k = k.on_device(), args.v = v.on_device(), args.o = o.on_device(),
    args.lse = lse.on_device();
    const Shape shape{static_cast<int>(shape_q[0]), static_cast<int>(shape_q[1]),
                      static_cast<int>(shape_k[1]), static_cast<int>(shape_q[2]),
                      static_cast<int>(shape_k[2])};
    on().engine().get(spec, shape).launch(args);
    on().synchronize();
    o.download();
    lse.download();
    args.q = q.on_host(), args.k = k.on_host(), args.v = v.on_host(), args.o = o.on_host(),
    args.lse = lse.on_host();
    const verify::Report report = verify::verify_outputs(spec, args);
    EXPECT_TRUE(report.ok()) << report.str();
  }
};

TEST_P(Offsets, BetweenBatchEntries) {
  expect({2, 20, 1, 64}, {2, 33, 1, 64}, {far, 64, 64, 1});
}
TEST_P(Offsets, BetweenHeads) {
  expect({1, 20, 2, 64}, {1, 33, 2, 64}, {0, 64, far, 1});
}
TEST_P(Offsets, BetweenRows) {
  // Rows lie 2^24 elements apart. Row 128, where a second tile or block may begin, lies 2^31 from the first.
  expect({1, 300, 1, 64}, {1, 300, 1, 64}, {0, std::int64_t{1} << 24, 64, 1});
}

// The longest allowed sequence of keys: one row of zeros,
// repeated, so that lse tells how many keys each row saw.
class LongestKeys : public OnEveryDevice {
 protected:
  template <class T>
  Tensor place(DType dtype, std::initializer_list<std::int64_t> shape, const std::vector<T>& values) {
    host_.emplace_back(values.size() * sizeof(T));
    std::memcpy(host_.back().data(), values.data(), host_.back().size());
    Tensor t = Tensor::contiguous(host_.back().data(), dtype, on().device(), shape);
    if (on().is_cuda()) {
      device_.emplace_back(on().context(), host_.back().size());
      device_.back().copy_from(host_.back().data(), host_.back().size());
      t.data = device_.back().data();
    }
    return t;
  }

  // Checks that rows 0 and 1 see so many keys, by their lse.
  void expect_kept(std::vector<Mask> mask, AttentionArgs args, double first, double second) {
    const AttentionSpec spec = forward_spec(DType::bf16, dim, std::move(mask));
    args.q = place(DType::bf16, {1, 2, 1, dim}, std::vector<std::uint16_t>(2 * dim, 0x3f80));
    args.o = place(DType::bf16, {1, 2, 1, dim}, std::vector<std::uint16_t>(2 * dim, 0x7fff));
    args.lse = place(DType::fp32, {1, 1, 2}, std::vector<float>(2, -1));
    args.k = args.v = place(DType::bf16, {1, 1, 1, dim}, std::vector<std::uint16_t>(dim, 0));
    for (Tensor* t : {&*args.k, &*args.v}) {
      t->shape[1] = longest_sequence;
      t->strides[1] = 0;
    }
    on().engine().get(spec, {1, 2, longest_sequence, 1, 1}).launch(args);
    on().synchronize();
    float lse[2];
    if (on().is_cuda()) {
      device_[device_.size() - 2].copy_to(lse, sizeof lse);
      on().synchronize();
    } else {
      std::memcpy(lse, args.lse->data, sizeof lse);
    }
    EXPECT_NEAR(lse[0], std::log(first), 1e-4) << spec.to_json();
    EXPECT_NEAR(lse[1], std::log(second), 1e-4) << spec.to_json();
  }

  static constexpr int dim = 64;

 private:
  std::deque<std::vector<std::byte>> host_;
  std::deque<cuda::DeviceBuffer> device_;
};

TEST_P(LongestKeys, WindowsListsAndTrees) {
  constexpr int largest = std::numeric_limits<int>::max();
  constexpr CausalAlign top_left = CausalAlign::top_left;
  expect_kept({CausalMask{top_left}}, {}, 1, 2);
  expect_kept({SlidingWindowMask{}}, {.window_left = 4, .window_right = 0}, 5, 5);
  expect_kept({SlidingWindowMask{}}, {.window_left = 4, .window_right = largest}, 6, 5);
  expect_kept({SlidingWindowMask{top_left}}, {.window_left = largest, .window_right = 4}, 5, 6);
  expect_kept({SlidingWindowMask{.sinks = true}}, {.window_left = 4, .window_right = 7, .num_sinks = 3}, 9,
              8);
  constexpr int last = longest_sequence / 128 - 1;
  expect_kept({BlockSparseMask{}},
              {.block_offsets = place(DType::int32, {1, 1, 2}, std::vector<std::int32_t>{0, 2}),
               .block_indices = place(DType::int32, {2}, std::vector<std::int32_t>{0, last})},
              256, 256);
  const Tensor seen = place(DType::int32, {1, 2, 1}, std::vector<std::int32_t>{1, 3});
  expect_kept({TreeMask{}},
              {.tree_bits = seen, .prefix_lengths = place(DType::int32, {1}, std::vector<std::int32_t>{0})},
              1, 2);
}

FLASHJIT_ON_EVERY_DEVICE(Offsets);
FLASHJIT_ON_EVERY_DEVICE(LongestKeys);

}  // namespace
}  // namespace flashjit::testing_support
