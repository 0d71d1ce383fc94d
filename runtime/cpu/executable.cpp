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
#include "runtime/executable.hpp"

namespace flashjit {
namespace {

// The rendered entry: computes items [begin, end); scratch is this thread's alone during the call.
using Entry = void (*)(const void* params, long long begin, long long end, void* scratch);

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
  std::uint64_t step_of_scratch = 0;  // whose head it begins with
} lent;

std::atomic<std::uint64_t> next_step{1};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const ParallelFor& parallel_for, int num_threads, const std::string& code,
                const std::vector<Step>& steps)
      : object_(code), parallel_for_(parallel_for), num_threads_(num_threads) {
    for (const Step& step : steps)
      steps_.push_back(
          {reinterpret_cast<Entry>(object_.function(step.entry)), static_cast<std::size_t>(step.scratch)});
  }

  int parallelism() const override { return num_threads_; }

  void launch(const Launch& launch, Stream) const override {
    for (std::size_t i = 0; i < launch.size(); ++i) {
      const StepLaunch& step = launch[i];
      if (step.items.lent_bytes == 0) {
        run(steps_[i], step);
      } else {
        run_with_memory(steps_[i], step);
      }
    }
  }

 private:
  struct LoadedStep {
    Entry entry;
    std::size_t scratch;
  };
  struct Work {
    Entry entry;
    const StepLaunch& step;
    const std::uint64_t number;  // no other's
    const std::size_t scratch;   // bytes of each thread
    std::atomic<bool> out_of_memory = false;
  };

  // The memory is taken for as long as it is needed: a host's parallel-for may run another launch on this
  // thread meanwhile. A prepared launch may be launched by several threads at once, so the step is copied.
  void run_with_memory(const LoadedStep& loaded, StepLaunch step) const {
    Buffer memory = std::move(lent.launch);
    step.items.lend(step, memory.at_least(step.items.lent_bytes));
    run(loaded, step);
    lent.launch = std::move(memory);
  }

  void run(const LoadedStep& loaded, const StepLaunch& step) const {
    const std::size_t scratch = loaded.scratch + step.items.more_scratch;
    Work work{.entry = loaded.entry,
              .step = step,
              .number = next_step.fetch_add(1, std::memory_order_relaxed),
              .scratch = std::max(scratch, step.items.scratch_head.size())};
    parallel_for_(step.items.pieces, &run_pieces, &work);
    if (work.out_of_memory)
      throw Error(ErrorCode::device_failed, "a thread could not allocate its " +
                                                std::to_string(work.scratch) +
                                                " bytes of scratch for the CPU kernel");
  }

  // Called by threads that may belong to the host: lets no exception out.
  static void run_pieces(void* context, std::int64_t begin, std::int64_t end) {
    Work& work = *static_cast<Work*>(context);
    const Items& items = work.step.items;
    void* const scratch = lent.scratch.at_least(work.scratch);
    if (scratch == nullptr) {
      lent.step_of_scratch = 0;
      work.out_of_memory = true;
      return;
    }
    if (lent.step_of_scratch != work.number) {
      std::memcpy(scratch, items.scratch_head.data(), items.scratch_head.size());
      lent.step_of_scratch = work.number;
    }
    const auto item =
        [&](std::int64_t piece) {  // the first of it; items that do not divide go to the first ones
          return items.count / items.pieces * piece + std::min(piece, items.count % items.pieces);
        };
    work.entry(work.step.params.data(), item(begin), item(end), scratch);
  }

  const LoadedObject object_;
  const ParallelFor parallel_for_;
  const int num_threads_;
  std::vector<LoadedStep> steps_;
};

}  // namespace

std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps) {
  return std::make_unique<CpuExecutable>(parallel_for, num_threads, code, steps);
}

}  // namespace flashjit
