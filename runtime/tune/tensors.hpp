// The tensors that candidates run on while they are measured, and the comparison of their outputs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// Several sets of tensors with the same random values. Launches that take them in turn find little of their
// data in a cache, as in an application that computes other things in between. The inputs of all sets
// together are twice as large as the device's last-level cache, as far as memory allows, in at most 64 sets.
class TuneTensors {
 public:
  // Throws invalid_argument for a shape with nothing to compute, device_failed if memory is short.
  TuneTensors(const AttentionSpec& spec, const Shape& shape, Device device);

  // Null on a CPU.
  const cuda::Context* context() const { return context_.get(); }
  const std::vector<AttentionArgs>& sets() const { return sets_; }

  // A set's arguments with a workspace of so many bytes. All sets share one; launches in turn may.
  AttentionArgs with_workspace(const AttentionArgs& set, std::size_t bytes);

  struct Output {
    const Argument* argument;  // null: the gradient of a table
    std::vector<char> elements;
    const char* name = nullptr;  // of a gradient
  };
  // Fills the first set's outputs with NaN.
  void poison();
  // The first set's outputs; waits for the device.
  std::vector<Output> fetch();

 private:
  struct Buffer {
    std::unique_ptr<char, void (*)(void*)> host{nullptr, nullptr};
    cuda::DeviceBuffer device;
    std::size_t bytes = 0;
    void* data() const { return host ? host.get() : device.data(); }
  };
  Buffer allocate(std::size_t bytes);
  void write(Buffer& buffer, const void* from);

  std::unique_ptr<cuda::Context> context_;
  std::vector<Buffer> buffers_;
  std::vector<AttentionArgs> sets_;
  std::vector<std::unique_ptr<const std::string>> gradient_names_;
  std::vector<std::vector<NamedArgument>> named_;  // of each set
  Device device_;
  std::optional<Tensor> workspace_;  // the largest
  struct OutputBuffer {
    const Argument* argument;
    std::size_t index;  // among the buffers
    const char* name;
  };
  std::vector<OutputBuffer> outputs_;  // of the first set
};

// How `outputs` differ from `expected`, both from kernels of the same spec on the same
// inputs: "o differs ... in row 3 ..."; empty if rounding explains the difference. Bounds:
//   rows of o:  |a - b| <= 16 (u + 2^-12) |b| in the Euclidean norm, where u is the unit roundoff of the
//               dtype, 2^-8 for bf16 and 2^-11 for fp16. Both round the weights P and o to it: their errors
//               are independent and stay near 2 u of the row. 2^-12 covers exponentials and sums in float32.
//   lse:        |a - b| <= 2^-9 + 2^-20 |b|
//   gradients of tables: both are numbers. Their terms may cancel, so nothing says how far apart they may be.
std::string output_difference(const AttentionSpec& spec, const std::vector<TuneTensors::Output>& outputs,
                              const std::vector<TuneTensors::Output>& expected);

}  // namespace flashjit
