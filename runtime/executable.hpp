// Machine code loaded on a device, and what a launch hands to it. Neither knows an operation: which steps a
// launch has is planned in operations/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "codegen/error.hpp"
#include "codegen/kernel_source.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

namespace cuda {
class Context;
}

// Blocks of a step on a GPU.
struct Grid {
  unsigned x = 0, y = 1, z = 1;
};

struct StepLaunch;

// Items of a step on a CPU, which threads take in pieces of consecutive ones, as evenly many as can be.
struct Items {
  std::int64_t count = 0, pieces = 0;
  // Bytes of each thread's scratch beyond what the step's source asks for, and what it begins with when the
  // thread comes to the step.
  std::size_t more_scratch = 0;
  std::array<std::byte, 64> scratch_head{};
  // Memory for all items together, which the launching thread lends. `lend` puts it into the step's params;
  // null where there is none, which the step must do without.
  std::size_t lent_bytes = 0;
  void (*lend)(StepLaunch& step, void* memory) = nullptr;
};

// One step of a launch, for the kernel of the same place in KernelSource::steps.
struct StepLaunch {
  static constexpr std::size_t most_params_bytes = 1024;

  // The kernel's parameter, of its own type; on a GPU it may have a second one, from `second` on.
  alignas(64) std::array<std::byte, most_params_bytes> params;
  std::size_t second = 0;
  Grid grid;
  // On a GPU: may begin before the step before it has ended. Its kernel waits for that one's results
  // (griddepcontrol.wait).
  bool dependent = false;
  Items items;

  // Zeros but for what they are derived from.
  template <class Params, class Base>
  Params& make_params(const Base& base) {
    static_assert(sizeof(Params) <= most_params_bytes && alignof(Params) <= 64 &&
                  std::is_trivially_copyable_v<Params>);
    Params& made = *new (params.data()) Params{};
    static_cast<Base&>(made) = base;
    return made;
  }
  // The second parameter of a kernel whose first is of type First. Not initialised.
  template <class First, class Second>
  Second& make_second() {
    constexpr std::size_t at = (sizeof(First) + 63) / 64 * 64;
    static_assert(at + sizeof(Second) <= most_params_bytes && alignof(Second) <= 64 &&
                  std::is_trivially_copyable_v<Second>);
    second = at;
    return *new (params.data() + at) Second;
  }
  template <class Params>
  Params& params_as() {
    return *std::launder(reinterpret_cast<Params*>(params.data()));
  }
};

// All that one launch hands to the machine code, as often as wanted.
class Launch {
 public:
  static constexpr std::size_t most_steps = 4;

  // After this launch's last one.
  StepLaunch& add_step() { return *new (&steps_[size_++].step) StepLaunch; }
  std::size_t size() const { return size_; }
  const StepLaunch& operator[](std::size_t i) const { return steps_[i].step; }

 private:
  // Steps that a launch does not have cost it nothing.
  union Room {
    Room() {}
    StepLaunch step;
  };
  std::array<Room, most_steps> steps_;
  std::size_t size_ = 0;
};

// Thread-safe. A launch allocates nothing, once the threads of a CPU have its scratch.
class Executable {
 public:
  virtual ~Executable() = default;
  // Runs the launch's steps one after the other. There are as many as were loaded, or none.
  virtual void launch(const Launch& launch, Stream stream) const = 0;
  // Multiprocessors of a GPU; on a CPU the threads that work is cut for.
  virtual int parallelism() const = 0;
  // Null on a CPU.
  virtual const cuda::Context* context() const { return nullptr; }
};

// Code that cannot be loaded whatever else is tried: damaged, or of another kind of machine. Every other
// failure to load (no memory, no context, pages that may not be executable) says nothing against the code.
class BadCode : public Error {
 public:
  using Error::Error;
};

// `code` is what a Compiler made of a source with these steps. Throw device_failed or target_unavailable, as
// BadCode where the code is to blame.
std::unique_ptr<Executable> load_cuda(int device_index, const std::string& code,
                                      const std::vector<Step>& steps);
// num_threads: those of parallel_for that work is cut for.
std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps);

}  // namespace flashjit
