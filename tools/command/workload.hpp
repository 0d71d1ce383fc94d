// The tensors of a problem, generated or the user's own, on the host and on the device.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "codegen/arguments/table.hpp"
#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/options.hpp"
#include "tools/verify/random_masks.hpp"
#include "tools/verify/random_tensor.hpp"

namespace flashjit::command {

// A tensor that owns its host memory, 64-byte aligned.
class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<std::int64_t> shape);

  const Tensor& view() const { return view_; }
  std::size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t bytes_ = 0;
  Tensor view_;
};

// Whether a launch keeps something that the tensor held before: an input, or a cache that it writes rows of.
constexpr bool is_read(const AttentionSpec& spec, const flashjit::Argument& argument) {
  return argument.role_in(spec) == Role::input || argument.role == Role::input;
}

// Paths of .npy files, one for each argument; empty: the tensor is generated, or absent.
class TensorFiles {
 public:
  std::string& operator[](const flashjit::Argument& argument) { return paths_[&argument - arguments]; }
  const std::string& operator[](const flashjit::Argument& argument) const {
    return paths_[&argument - arguments];
  }
  std::string& operator[](TensorMember member) { return (*this)[argument_of(member)]; }
  const std::string& operator[](TensorMember member) const { return (*this)[argument_of(member)]; }

 private:
  std::array<std::string, num_arguments> paths_;
};

// Tables and scalars of a spec's formulas: of `given` ("NAME=VALUE"), the others typical. The names are the
// spec's.
struct NamedValues {
  std::vector<std::pair<std::string_view, HostTensor>> tables;
  std::vector<NamedArgument> scalars;
  // The file of each table's gradient, whose name is "d_" and the table's; empty: it is not written.
  std::vector<std::string> gradient_files;
};
// Throws invalid_argument for a name that the spec does not declare, and for a file that is no such table.
// `shape` has the totals of packed sequences.
NamedValues named_values(const AttentionSpec& spec, const Shape& shape,
                         const std::vector<std::string>& given);

// Floating-point operations by the customary count, which codegen/spec/operation.hpp has.
double customary_flops(const AttentionSpec& spec, const AttentionArgs& args);
// Bytes of K and V, each read once for a key/value head. Reading them bounds a decode.
double bytes_of_keys(const AttentionSpec& spec, const AttentionArgs& args);

// Bytes that an append_kv reads and writes: the new rows, and Q where it is rotated.
double appended_bytes(const AttentionSpec& spec, const AttentionArgs& args);

// Bytes that a copy_kv of all rows of its sources reads and writes, wherever they go.
double moved_bytes(const AttentionSpec& spec, const AttentionArgs& args);

class Workload {
 public:
  // Seeded q, k and v, by default with outliers and long rows. With varlen or padding the first sequence has
  // the shape's length and the others are shorter. Block lists and trees are random,
  // but for lists of the spec's other masks.
  static Workload generate(const AttentionSpec& spec, const Shape& shape, std::uint64_t seed,
                           const MaskOptions& masks = {}, const verify::RandomOptions& numbers = {});
  // Throws invalid_argument for files that cannot be read or do not fit together; the kernel checks the rest.
  // An argument that may be absent needs no file, nor does a cache that is not in pages and that a launch
  // only writes into.
  static Workload read(const AttentionSpec& spec, const TensorFiles& files, const MaskOptions& masks = {});

  // Default: 1 / sqrt(head_dim).
  void set_softmax_scale(float scale) { host_args_.softmax_scale = device_args_.softmax_scale = scale; }
  // Has no effect on a spec without dropout.
  void set_dropout(const DropoutOptions& options);
  // On a GPU: copies the inputs to its memory and allocates the outputs. On a CPU: uses the host's memory.
  void place(Device device);
  // After place(): K and V of a cache lie as [batch or page, heads, seqlen, head_dim]. Numbers change places.
  void put_heads_first();
  // Inputs that another operation computes, as a forward o and lse of a backward: by the engine, after
  // place(); or in float64. Other operations keep what they have.
  void compute_forward(Engine& engine);
  void compute_forward();
  // Null on a CPU.
  const cuda::Context* context() const { return context_.get(); }
  // The arguments of a launch of the kernel, after place(), with the workspace that it needs.
  const AttentionArgs& args_for(const Kernel& kernel);
  // The same tensors in host memory. Outputs are those of the last fetch().
  const AttentionArgs& host_args() const { return host_args_; }
  // Fills the outputs with NaN, so that an element that a kernel does not write shows.
  void poison();
  // Waits for the device and copies the outputs to the host.
  void fetch();
  // Writes what a launch has written, as of the last fetch(), to the files that are named.
  void write_outputs(const TensorFiles& files) const;

  const AttentionSpec& spec() const { return spec_; }
  const Shape& shape() const { return shape_; }
  std::int64_t query_rows() const;  // of all heads
  // Operations of one launch.
  double flops() const;
  // Bytes of the traffic that bounds the operation; 0 if arithmetic does.
  double bound_bytes() const;
  // Bytes of all that a launch reads, and of all that it writes.
  std::pair<std::int64_t, std::int64_t> bytes_in_and_out() const;
  void write_inputs(const std::string& folder) const;

 private:
  struct Placed {
    HostTensor host;
    cuda::DeviceBuffer device;
    const flashjit::Argument* argument = nullptr;  // null: a table of the spec's own
    std::string_view name;
    bool output = false;    // holds nothing before a launch
    bool written = false;   // an output, or a cache that a decode appends to
    std::string file = {};  // of a table's gradient: where it is written
  };

  explicit Workload(const AttentionSpec& spec) : own_(std::make_unique<AttentionSpec>(spec)), spec_(*own_) {}
  void add(const flashjit::Argument& argument, HostTensor tensor, bool output = false);
  void add_named(const std::vector<std::string>& given);
  Shape shape_of_inputs() const;
  void finish();

  std::unique_ptr<const AttentionSpec> own_;  // names refer to it, wherever the workload is moved
  const AttentionSpec& spec_;
  Shape shape_;
  std::unique_ptr<cuda::Context> context_;
  std::vector<Placed> tensors_;
  std::vector<cuda::DeviceBuffer> workspaces_;  // earlier launches may use all of them
  std::vector<HostTensor> host_workspaces_;
  std::vector<std::unique_ptr<const std::string>> gradient_names_;
  std::vector<NamedArgument> host_named_, device_named_;
  AttentionArgs host_args_, device_args_;
};

}  // namespace flashjit::command
