// An object in memory, driven over the caller's threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codegen/error.hpp"
#include "runtime/cpu/object.hpp"
#include "runtime/cpu/partition.hpp"
#include "runtime/executable.hpp"
#include "templates/shared/layout.h"

namespace flashjit {
namespace {

// The rendered entry: computes items [begin, end); scratch is this thread's alone during the call.
using Entry = void (*)(const device::ForwardParams* params, long long begin, long long end, void* scratch);

// Aligned memory that grows, and stays until its thread ends.
class Buffer {
 public:
  // Null if there is no memory.
  void* at_least(std::size_t bytes) {
    constexpr std::size_t alignment = 64;
    if (data_ == nullptr || bytes_ < bytes) {
      bytes = (bytes + alignment - 1) / alignment * alignment;
      data_.reset();  // before there are two
      data_.reset(std::aligned_alloc(alignment, bytes));
      bytes_ = data_ ? bytes : 0;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
};

// What one thread lends to the kernels it runs, and for a launch of its own to all of them together.
thread_local struct {
  Buffer scratch, launch;
  std::uint64_t launch_of_scratch = 0;  // whose packed blocks it holds
} lent;

std::atomic<std::uint64_t> next_launch{1};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const ParallelFor& parallel_for, int num_threads, const std::string& code,
                const std::vector<Step>& steps, const KernelInfo& info)
      : object_(code),
        parallel_for_(parallel_for),
        num_threads_(num_threads),
        spec_(info.spec),
        target_(info.target),
        config_(info.config) {
    for (const Step& step : steps)
      steps_.push_back(
          {reinterpret_cast<Entry>(object_.function(step.entry)), static_cast<std::size_t>(step.scratch)});
  }

  void encode(const device::ForwardParams& params, Launch& launch) const override { launch.params = params; }

  using Executable::launch;
  void launch(const Launch& launch, Stream) const override {
    device::ForwardParams params = launch.params;
    const Partition cut = partition(params, spec_, target_, config_, num_threads_);
    params.packed_heads = cut.packed_heads;
    params.tile_rows = cut.tile_rows;
    params.key_parts = cut.key_parts;
    // Taken for as long as it is needed: a host's parallel-for may run another launch on this thread
    // meanwhile.
    Buffer partials;
    if (cut.key_parts > 1) {
      partials = std::move(lent.launch);
      lend(partials, cut.tiles, params);
    }
    for (const LoadedStep& step : steps_) {
      const std::int64_t items = cut.tiles * params.key_parts;
      Work work{.step = step,
                .params = params,
                .number = next_launch.fetch_add(1, std::memory_order_relaxed),
                .packed_blocks = cut.packed_blocks,
                .scratch = step.scratch + packed_room,  // as much for any lengths
                .items = items,
                .pieces = std::min(cut.pieces, items)};
      parallel_for_(work.pieces, &run_pieces, &work);
      if (work.out_of_memory)
        throw Error(ErrorCode::device_failed, "a thread could not allocate its " +
                                                  std::to_string(work.scratch) +
                                                  " bytes of scratch for the CPU kernel");
    }
    if (cut.key_parts > 1) lent.launch = std::move(partials);
  }

 private:
  struct LoadedStep {
    Entry entry;
    std::size_t scratch;
  };
  struct Work {
    const LoadedStep& step;
    const device::ForwardParams& params;
    const std::uint64_t number;  // no other's
    const int packed_blocks;
    const std::size_t scratch;  // bytes of each thread
    const std::int64_t items, pieces;
    std::atomic<bool> out_of_memory = false;
  };

  // Room for the most that any launch of this kernel needs. Without memory tiles are not worked on in parts.
  void lend(Buffer& partials, std::int64_t tiles, device::ForwardParams& params) const {
    const std::size_t items = static_cast<std::size_t>(most_items_in_parts(num_threads_));
    const std::size_t results = items * sizeof(float) * device::cpu_part(config_.block_m, spec_.head_dim_v);
    const std::size_t counters = sizeof(device::u32) * static_cast<std::size_t>(tiles);
    void* const memory = partials.at_least(results + items * sizeof(device::u32));
    if (memory == nullptr) {
      params.key_parts = 1;
      return;
    }
    params.partials = static_cast<float*>(memory);
    params.arrived = reinterpret_cast<device::u32*>(static_cast<std::byte*>(memory) + results);
    std::memset(params.arrived, 0, counters);
  }

  // Called by threads that may belong to the host: lets no exception out.
  static void run_pieces(void* context, std::int64_t begin, std::int64_t end) {
    Work& work = *static_cast<Work*>(context);
    void* const scratch = lent.scratch.at_least(work.scratch);
    if (scratch == nullptr) {
      lent.launch_of_scratch = 0;
      work.out_of_memory = true;
      return;
    }
    if (lent.launch_of_scratch != work.number) {
      *static_cast<device::PackedHead*>(scratch) = {.head = -1, .blocks = work.packed_blocks};
      lent.launch_of_scratch = work.number;
    }
    const auto item =
        [&](std::int64_t piece) {  // the first of it; tiles that do not divide go to the first ones
          return work.items / work.pieces * piece + std::min(piece, work.items % work.pieces);
        };
    work.step.entry(&work.params, item(begin), item(end), scratch);
  }

  const LoadedObject object_;
  const ParallelFor parallel_for_;
  const int num_threads_;
  const AttentionSpec spec_;
  const Target target_;
  const KernelConfig config_;
  std::vector<LoadedStep> steps_;
};

}  // namespace

std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps,
                                     const KernelInfo& info) {
  return std::make_unique<CpuExecutable>(parallel_for, num_threads, code, steps, info);
}

}  // namespace flashjit
