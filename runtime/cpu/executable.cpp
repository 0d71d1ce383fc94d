// load_cpu: a loaded object, run on the caller's threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/base/float_state.hpp"
#include "runtime/compiler.hpp"
#include "runtime/cpu/object.hpp"
#include "runtime/executable.hpp"

namespace flashjit {
namespace {

// The rendered function: computes items [begin, end). Only the calling thread uses `scratch` during the call.
using StepFunction = void (*)(const void* params, long long begin, long long end, void* scratch);

// Aligned memory that grows, and is kept until its thread ends.
class Buffer {
 public:
  // Null if there is no memory.
  void* at_least(std::size_t bytes) {
    constexpr std::size_t alignment = 64;
    if (data_ == nullptr || bytes_ < bytes) {
      bytes = (bytes + alignment - 1) / alignment * alignment;
      data_.reset();  // frees the old memory first
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

// The memory that a thread lends: its scratch to the kernels that
// it runs, and `launch` to all threads of a launch that it makes.
thread_local struct {
  Buffer scratch, launch;
  std::uint64_t step_of_scratch = 0;  // the step whose head the scratch begins with
} lent;

std::atomic<std::uint64_t> next_step{1};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const ParallelFor& parallel_for, int num_threads, const std::string& code,
                const std::vector<Step>& steps)
      : Executable(steps), object_(code), parallel_for_(parallel_for), num_threads_(num_threads) {
    for (const Step& step : steps) {
      if (void* const bytes = object_.find(step.function + params_bytes_suffix))
        require_params(step, reinterpret_cast<unsigned (*)()>(bytes)(), 0);
      loaded_.push_back({reinterpret_cast<StepFunction>(object_.function(step.function)),
                         static_cast<std::size_t>(step.scratch)});
    }
  }

  int parallelism() const override { return num_threads_; }

  void run(const Launch& launch, Stream) const override {
    for (std::size_t i = 0; i < launch.size(); ++i) {
      const StepLaunch& step = launch[i];
      if (step.items.pieces == 0) continue;  // a host's parallel-for may call for an empty range
      if (step.items.lent_bytes == 0) {
        run(loaded_[i], step);
      } else {
        run_with_memory(loaded_[i], step);
      }
    }
  }

 private:
  struct LoadedStep {
    StepFunction function;
    std::size_t scratch;
  };
  struct Work {
    StepFunction function;
    const StepLaunch& step;
    const std::uint64_t number;  // unique
    const std::size_t scratch;   // bytes per thread
    std::atomic<bool> out_of_memory = false;
  };

  // The memory is moved out of `lent` while it is in use: meanwhile a host's parallel-for may run another
  // launch on this thread. The step is copied, since several threads may launch a prepared launch at once.
  void run_with_memory(const LoadedStep& loaded, StepLaunch step) const {
    Buffer memory = std::move(lent.launch);
    {
      const DefaultSseState state;
      step.items.lend(step, memory.at_least(step.items.lent_bytes));
    }
    run(loaded, step);
    lent.launch = std::move(memory);
  }

  void run(const LoadedStep& loaded, const StepLaunch& step) const {
    const std::size_t scratch = loaded.scratch + step.items.more_scratch;
    Work work{.function = loaded.function,
              .step = step,
              .number = next_step.fetch_add(1, std::memory_order_relaxed),
              .scratch = std::max(scratch, step.items.scratch_head.size())};
    parallel_for_(step.items.pieces, &run_pieces, &work);
    if (work.out_of_memory)
      throw Error(ErrorCode::device_failed, "a thread could not allocate its " +
                                                std::to_string(work.scratch) +
                                                " bytes of scratch for the CPU kernel");
  }

  // Runs on threads that may belong to the host, so it throws nothing.
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
    // The first item of a piece. The first pieces have one more if the items do not divide evenly.
    const auto item = [&](std::int64_t piece) {
      return items.count / items.pieces * piece + std::min(piece, items.count % items.pieces);
    };
    const DefaultSseState state;
    work.function(work.step.params.data(), item(begin), item(end), scratch);
  }

  const LoadedObject object_;
  const ParallelFor parallel_for_;
  const int num_threads_;
  std::vector<LoadedStep> loaded_;
};

}  // namespace

std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps) {
  return std::make_unique<CpuExecutable>(parallel_for, num_threads, code, steps);
}

}  // namespace flashjit
