#include "runtime/parallel/cuda_copy.hpp"

#include <cstddef>

#include "runtime/cuda/driver_api.hpp"
#include "runtime/parallel/tensor_parts.hpp"

namespace flashjit {
namespace {

void enqueue_block(const Block& block, cuda::CUstream stream) {
  const auto width = static_cast<std::size_t>(block.width), height = static_cast<std::size_t>(block.height);
  if (height == 1) {
    cuda::check(cuda::driver().MemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(block.to),
                                           reinterpret_cast<cuda::CUdeviceptr>(block.from), width, stream),
                "cuMemcpyAsync");
    return;
  }
  cuda::CUDA_MEMCPY2D copy{};
  copy.srcMemoryType = copy.dstMemoryType = cuda::CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = reinterpret_cast<cuda::CUdeviceptr>(block.from);
  copy.dstDevice = reinterpret_cast<cuda::CUdeviceptr>(block.to);
  copy.srcPitch = static_cast<std::size_t>(block.from_pitch);
  copy.dstPitch = static_cast<std::size_t>(block.to_pitch);
  copy.WidthInBytes = width;
  copy.Height = height;
  cuda::check(cuda::driver().Memcpy2DAsync(&copy, stream), "cuMemcpy2DAsync");
}

}  // namespace

void enqueue_copy(const cuda::Context& context, const Tensor& to, const Tensor& from, Stream stream) {
  const cuda::ContextScope scope(context);
  for (const Block& block : blocks_of(to, from)) enqueue_block(block, static_cast<cuda::CUstream>(stream));
}

void load_copies(const cuda::Context& context, void* memory, Stream stream) {
  const cuda::ContextScope scope(context);
  auto* const bytes = static_cast<std::byte*>(memory);
  enqueue_block({bytes, bytes + 64, 64, 1, 64, 64}, static_cast<cuda::CUstream>(stream));
  enqueue_block({bytes, bytes + 64, 16, 2, 32, 32}, static_cast<cuda::CUstream>(stream));
}

}  // namespace flashjit
