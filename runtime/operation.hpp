// The runtime side of an operation: a file in operations/.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "codegen/base/shape.hpp"
#include "codegen/base/target.hpp"
#include "codegen/spec/config.hpp"
#include "codegen/spec/spec.hpp"
#include "runtime/arguments/overlap.hpp"
#include "runtime/executable.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// The facts of a kernel that the plan of a launch depends on.
struct PlannedKernel {
  const AttentionSpec& spec;
  const Target& target;
  const KernelConfig& config;
  Device device{};
  int parallelism = 1;                     // Executable::parallelism
  const cuda::Context* context = nullptr;  // null on a CPU
  std::span<const Step> steps = {};        // of the kernel; a launch has each of them, with or without work
};

struct OperationRuntime {
  // The bytes that a shape needs; they serve all smaller shapes.
  std::size_t (*workspace_bytes)(const PlannedKernel& kernel, const Shape& shape);
  // Checks the arguments and adds the launch's steps, none
  // if there is nothing to compute. Throws invalid_argument.
  void (*plan)(const PlannedKernel& kernel, const AttentionArgs& args, Launch& launch);
};

const OperationRuntime& runtime_of(Operation op);

// The memory of args.workspace, checked to have so many bytes; null if bytes is 0.
void* require_workspace(const std::optional<Tensor>& given, std::size_t bytes, Device device);

// The bytes as a tensor.
inline Tensor bytes_at(void* memory, std::size_t bytes) {
  return {.data = memory,
          .dtype = DType::uint8,
          .rank = 1,
          .shape = {static_cast<std::int64_t>(bytes)},
          .strides = {1}};
}

// Gives the steps that are left no work.
inline void leave_out_the_rest(const PlannedKernel& kernel, Launch& launch) {
  while (launch.size() < kernel.steps.size()) launch.add_step();
}

// The runtime of an operation. The operation's file describes it by a struct with these static functions:
//   check(spec, device, args)     returns {params, shape, empty}; empty: there is nothing to compute
//   workspace_bytes(kernel, shape)
//   plan_cuda(kernel, params, workspace, launch)
//   plan_cpu(kernel, params, workspace, launch)  add the steps that have work (runtime/step_params.hpp)
// and, if a launch may need more than its shape's bytes,
//   workspace_of(kernel, checked)
// or, if a launch without a workspace is as right,
//   workspace_is_optional
template <class Operation>
constexpr OperationRuntime operation_runtime = {
    &Operation::workspace_bytes, [](const PlannedKernel& kernel, const AttentionArgs& args, Launch& launch) {
      const auto checked = Operation::check(kernel.spec, kernel.device, args);
      if (checked.empty) return;
      std::size_t bytes = 0;
      if constexpr (requires { Operation::workspace_of(kernel, checked); })
        bytes = Operation::workspace_of(kernel, checked);
      else
        bytes = Operation::workspace_bytes(kernel, checked.shape);
      if constexpr (requires { Operation::workspace_is_optional; })
        if (!args.workspace) bytes = 0;
      void* const workspace = require_workspace(args.workspace, bytes, kernel.device);
      const Tensor used = bytes_at(workspace, bytes);
      require_outputs_apart(kernel.spec, args, workspace ? &used : nullptr);
      const auto plan = kernel.target.is_cuda() ? &Operation::plan_cuda : &Operation::plan_cpu;
      plan(kernel, checked.params, workspace, launch);
      leave_out_the_rest(kernel, launch);
    }};

}  // namespace flashjit
