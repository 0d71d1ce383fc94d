// Machine code loaded on a device, and the data that a launch passes to
// it. Neither knows an operation: operations/ plans the steps of a launch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "codegen/base/error.hpp"
#include "codegen/families/kernel_source.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

namespace cuda {
class Context;
}

// The grid of a step on a GPU: numbers of blocks.
struct Grid {
  unsigned x = 0, y = 1, z = 1;
};

struct StepLaunch;

// The items of a step on a CPU. Threads take pieces of consecutive items, as evenly divided as possible.
struct Items {
  std::int64_t count = 0, pieces = 0;
  // Bytes of each thread's scratch beyond those of the step's source, and
  // the bytes that the scratch begins with when a thread begins the step.
  std::size_t more_scratch = 0;
  std::array<std::byte, 64> scratch_head{};
  // Memory for all items together, which the launching thread lends. `lend` puts it into
  // the step's params. It gets null if there is no memory; the step must do without.
  std::size_t lent_bytes = 0;
  void (*lend)(StepLaunch& step, void* memory) = nullptr;
};

// One step of a launch: the data for the kernel at the same place in KernelSource::steps.
struct StepLaunch {
  static constexpr std::size_t most_params_bytes = 4096;

  // The kernel's parameter, of the kernel's own type. On a GPU a
  // kernel may have a second one, which begins at byte `second`.
  alignas(64) std::array<std::byte, most_params_bytes> params;
  std::size_t second = 0;
  const Step* described = nullptr;  // the kernel's step; null where a test makes a launch of its own
  Grid grid;
  // On a GPU: the step may begin before the previous step has ended.
  // Its kernel waits for that step's results (griddepcontrol.wait).
  bool dependent = false;
  Items items;

  // Makes the params from `base`; all other members are zero.
  template <class Params, class Base>
  Params& make_params(const Base& base) {
    static_assert(sizeof(Params) <= most_params_bytes && alignof(Params) <= 64 &&
                  std::is_trivially_copyable_v<Params>);
    Params& made = *new (params.data()) Params{};
    static_cast<Base&>(made) = base;
    return made;
  }
  // The second parameter of a described step. It is not initialised.
  template <class Second>
  Second& make_second() {
    static_assert(alignof(Second) <= 64 && std::is_trivially_copyable_v<Second>);
    second = (described->params.bytes + 63) / 64 * 64;
    return *new (params.data() + second) Second;
  }
  template <class Params>
  Params& params_as() {
    return *std::launder(reinterpret_cast<Params*>(params.data()));
  }
};

// Everything that one launch passes to the machine code. It may be launched many times.
class Launch {
 public:
  static constexpr std::size_t most_steps = 4;

  // Adds a step after the last one. Its params are not initialised.
  StepLaunch& add_step() { return *new (&steps_[size_++].step) StepLaunch; }
  StepLaunch& last() { return steps_[size_ - 1].step; }
  std::size_t size() const { return size_; }
  const StepLaunch& operator[](std::size_t i) const { return steps_[i].step; }

 private:
  // A union: steps that a launch does not have are not initialised, and so cost nothing.
  union Room {
    Room() {}
    StepLaunch step;
  };
  std::array<Room, most_steps> steps_;
  std::size_t size_ = 0;
};

// Loaded machine code. Thread-safe. A launch allocates
// nothing, except scratch that a CPU thread allocates once.
class Executable {
 public:
  explicit Executable(std::vector<Step> steps) : steps_(std::move(steps)) {}
  virtual ~Executable() = default;
  // Runs the launch's steps one after the other, but for those without work. A launch has as many steps as
  // were loaded, or none. Throws internal for any other number; before all else, what require_device()
  // throws.
  void launch(const Launch& launch, Stream stream) const {
    require_device();
    if (launch.size() == 0) return;
    if (launch.size() != steps_.size()) refuse_steps(launch.size());
    run(launch, stream);
  }
  const std::vector<Step>& steps() const { return steps_; }
  // The multiprocessors of a GPU, or the CPU threads that work is divided for.
  virtual int parallelism() const = 0;
  // Null on a CPU.
  virtual const cuda::Context* context() const { return nullptr; }

 protected:
  // Throws target_unavailable if this process cannot use the device: a forked child its parent's GPU.
  virtual void require_device() const {}
  virtual void run(const Launch& launch, Stream stream) const = 0;
  // Throws internal unless the step's kernel takes params of the sizes that launches make. 0: no second one.
  static void require_params(const Step& step, std::size_t bytes, std::size_t second_bytes);

 private:
  [[noreturn]] void refuse_steps(std::size_t launched) const;

  const std::vector<Step> steps_;
};

// Thrown for code that cannot be loaded in any circumstances: it is damaged,
// or for another kind of machine. Every other failure to load (no memory, no
// context, pages that may not be executable) does not blame the code.
class BadCode : public Error {
 public:
  using Error::Error;
};

// `code` is the code that a Compiler made from a source with these steps. Both functions
// throw device_failed or target_unavailable, as BadCode if the code is to blame.
std::unique_ptr<Executable> load_cuda(int device_index, const std::string& code,
                                      const std::vector<Step>& steps);
// `num_threads`: the threads of `parallel_for` that work is divided for.
std::unique_ptr<Executable> load_cpu(const ParallelFor& parallel_for, int num_threads,
                                     const std::string& code, const std::vector<Step>& steps);

}  // namespace flashjit
