#pragma once

#include <memory>

#include "codegen/base/float_state.hpp"
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
    operation().plan(planned(), args, launch);
  }
};

}  // namespace flashjit
