#include "runtime/cuda/cold_launches.hpp"

#include <numeric>

#include "runtime/compiler.hpp"

namespace flashjit::cuda {
namespace {

constexpr int threads = 512, blocks_of_multiprocessor = 4;
constexpr std::size_t other_bytes = std::size_t{256} << 20;

struct ReadParams {  // as in the kernel's text
  const void* vectors;
  std::int64_t count;
  void* sums;
};

// Eight loads of a thread are in flight at once.
constexpr char text[] = R"(struct Params {
  const uint4* __restrict__ vectors;
  long long count;
  unsigned* sums;
};
extern "C" __global__ void __launch_bounds__(512, 4) plain_read(const __grid_constant__ Params p) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = i + j * step < p.count ? __ldg(p.vectors + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
  }
  __shared__ unsigned of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  sum = __reduce_add_sync(0xffffffffu, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(&of_block, sum);
  __syncthreads();
  if (threadIdx.x == 0) p.sums[blockIdx.x] = of_block;
}
)";

}  // namespace

KernelSource plain_read_source(const Target& target) {
  KernelSource source;
  source.target = target;
  source.text = text;
  source.steps = {{.function = "plain_read", .threads = threads}};
  return source;
}

PlainRead::PlainRead(const Context& context) : context_(context) {
  const CudaDevice device = cuda_device(context.index());
  const KernelSource source = plain_read_source(Target::for_compute_capability(device.major, device.minor));
  kernel_ = load_cuda(context.index(), nvrtc_compiler()->compile(source).code, source.steps);
  blocks_ = static_cast<unsigned>(device.multiprocessors * blocks_of_multiprocessor);
  sums_ = DeviceBuffer(context, blocks_ * sizeof(std::uint32_t));
}

void PlainRead::launch(const void* data, std::size_t bytes, Stream stream) const {
  Launch launch;
  StepLaunch& step = launch.add_step();
  step.make_params<ReadParams>(
      ReadParams{.vectors = data, .count = static_cast<std::int64_t>(bytes / 16), .sums = sums_.data()});
  step.grid = {blocks_};
  kernel_->launch(launch, stream);
}

std::uint32_t PlainRead::sum() const {
  std::vector<std::uint32_t> sums(blocks_);
  synchronize(context_);
  copy_to_host(context_, sums.data(), sums_.data(), sums_.size());
  return std::accumulate(sums.begin(), sums.end(), std::uint32_t{0});
}

ColdLaunches::ColdLaunches(const Context& context, const PlainRead* read, Before before)
    : context_(context), read_(read), before_(before), stream_(context), other_(context, other_bytes) {
  other_.fill(1, stream_.get());
}

std::vector<double> ColdLaunches::operator()(const std::function<void(Stream)>& launch, int count) {
  const ContextScope scope(context_);
  while (events_.size() < 2 * static_cast<std::size_t>(count)) events_.emplace_back(context_);
  for (int i = 0; i < count; ++i) {
    if (before_ == Before::read)
      read_->launch(other_.data(), other_.size(), stream_.get());
    else
      other_.fill(0, stream_.get());
    events_[static_cast<std::size_t>(2 * i)].record(stream_.get());
    launch(stream_.get());
    events_[static_cast<std::size_t>(2 * i + 1)].record(stream_.get());
  }
  std::vector<double> samples;
  for (int i = 0; i < count; ++i)
    samples.push_back(
        elapsed_ms(events_[static_cast<std::size_t>(2 * i)], events_[static_cast<std::size_t>(2 * i + 1)]));
  if (count > 0)
    ms_with_preparation_ =
        static_cast<double>(elapsed_ms(events_[0], events_[static_cast<std::size_t>(2 * count - 1)])) / count;
  return samples;
}

}  // namespace flashjit::cuda
