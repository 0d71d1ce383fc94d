// A kernel without its machine code: launches can be planned for it, and an emulator runs their steps.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "codegen/render.hpp"
#include "runtime/operation.hpp"

namespace flashjit::testing_support {

// `parallelism`: multiprocessors, or threads of a CPU. The spec, target and config must outlive it.
class PlannedWithoutCode {
 public:
  PlannedWithoutCode(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                     int parallelism)
      : steps_(render(spec, target, config).steps),
        kernel_{spec, target, config, {Device::Kind::cpu, 0}, parallelism, nullptr, steps_} {}
  PlannedWithoutCode(const PlannedWithoutCode&) = delete;

  const PlannedKernel& kernel() const { return kernel_; }

 private:
  const std::vector<Step> steps_;
  const PlannedKernel kernel_;
};

// The params of a step, whose kernel takes Params. Throws, as a loader does, if the launch made others.
template <class Params>
const Params& params_for(const StepLaunch& step) {
  if (step.described->params.bytes != sizeof(Params))
    throw std::logic_error(step.described->function + " takes " + std::to_string(sizeof(Params)) +
                           " bytes of params, and launches make " +
                           std::to_string(step.described->params.bytes));
  return const_cast<StepLaunch&>(step).params_as<Params>();
}

}  // namespace flashjit::testing_support
