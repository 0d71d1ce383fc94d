#pragma once

#include <memory>

#include "codegen/base/float_state.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/executable.hpp"
#include "runtime/flashjit.hpp"
#include "runtime/operation.hpp"

namespace flashjit {

struct Kernel::Impl {
  KernelInfo info;
  std::string info_json;
  Device device;
  std::unique_ptr<Executable> executable;

  PlannedKernel planned() const {
    return {info.spec,
            info.target,
            info.config,
            device,
            executable->parallelism(),
            executable->context(),
            executable->steps()};
  }
  const OperationRuntime& operation() const { return runtime_of(info.spec.op); }
  void plan(const AttentionArgs& args, Launch& launch) const {
    const DefaultSseState state;
    PlannedKernel kernel = planned();
    if (const int spare = args.spare_multiprocessors.value_or(0); spare != 0) {
      if (device.kind != Device::Kind::cuda || spare < 0 || spare >= kernel.parallelism)
        refuse_argument("spare_multiprocessors is ", spare, "; on a GPU 0 to ", kernel.parallelism - 1,
                        " would work, on a CPU 0");
      kernel.parallelism -= spare;
    }
    operation().plan(kernel, args, launch);
  }
};

}  // namespace flashjit
