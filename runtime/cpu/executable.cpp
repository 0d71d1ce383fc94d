// An object in memory, driven over the caller's threads.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "codegen/error.hpp"
#include "runtime/cpu/object.hpp"
#include "runtime/executable.hpp"

namespace flashjit {
namespace {

// The rendered entry: computes tiles [begin, end); scratch is this thread's alone during the call.
using Entry = void (*)(const device::ForwardParams* params, long long begin, long long end, void* scratch);

// What one thread lends to the kernels it runs: grows, and stays until the thread ends. Null if there is no
// memory.
void* thread_scratch(std::size_t bytes) {
  constexpr std::size_t alignment = 64;
  struct Buffer {
    void* data = nullptr;
    std::size_t bytes = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    bytes = (bytes + alignment - 1) / alignment * alignment;
    buffer.data = std::aligned_alloc(alignment, bytes);
    buffer.bytes = buffer.data != nullptr ? bytes : 0;
  }
  return buffer.data;
}

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const ParallelFor& parallel_for, const std::string& code, const std::vector<Step>& steps,
                int block_m)
      : object_(code), parallel_for_(parallel_for), block_m_(block_m) {
    for (const Step& step : steps)
      steps_.push_back(
          {reinterpret_cast<Entry>(object_.function(step.entry)), static_cast<std::size_t>(step.scratch)});
  }

  void encode(const device::ForwardParams& params, Launch& launch) const override { launch.params = params; }

  using Executable::launch;
  void launch(const Launch& launch, Stream) const override {
    const device::ForwardParams& params = launch.params;
    const std::int64_t blocks = (static_cast<std::int64_t>(params.seqlen_q) + block_m_ - 1) / block_m_;
    const std::int64_t tiles = params.batch * blocks * params.num_heads_q;
    for (const LoadedStep& step : steps_) {
      Work work{step, params, false};
      parallel_for_(tiles, &run_tiles, &work);
      if (work.out_of_memory)
        throw Error(ErrorCode::device_failed, "a thread could not allocate its " +
                                                  std::to_string(step.scratch) +
                                                  " bytes of scratch for the CPU kernel");
    }
  }

 private:
  struct LoadedStep {
    Entry entry;
    std::size_t scratch;
  };
  struct Work {
    const LoadedStep& step;
    const device::ForwardParams& params;
    std::atomic<bool> out_of_memory;
  };

  // Called by threads that may belong to the host: lets no exception out.
  static void run_tiles(void* context, std::int64_t begin, std::int64_t end) {
    Work& work = *static_cast<Work*>(context);
    void* const scratch = thread_scratch(work.step.scratch);
    if (scratch == nullptr && work.step.scratch > 0) {
      work.out_of_memory = true;
      return;
    }
    work.step.entry(&work.params, begin, end, scratch);
  }

  const LoadedObject object_;
  const ParallelFor parallel_for_;
  const int block_m_;
  std::vector<LoadedStep> steps_;
};

}  // namespace

std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, const std::string& code,
                                     const std::vector<Step>& steps, const KernelConfig& config) {
  return std::make_unique<CpuExecutable>(parallel_for, code, steps, config.block_m);
}

}  // namespace flashjit
