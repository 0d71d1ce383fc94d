#include "runtime/step_params.hpp"

#include <string>

namespace flashjit {

StepLaunch& add_step(const PlannedKernel& kernel, Launch& launch, std::string_view function) {
  while (launch.size() < kernel.steps.size() && launch.size() < Launch::most_steps) {
    const Step& next = kernel.steps[launch.size()];
    StepLaunch& added = launch.add_step();
    added.described = &next;
    if (next.function == function) return added;
  }
  std::string names;
  for (const Step& step : kernel.steps) names += " " + step.function;
  throw Error(ErrorCode::internal, "a launch has the step " + std::string(function) +
                                       ", and the kernel has none or had it before:" + names);
}

void refuse_params(const Step& step, const char* what) {
  throw Error(ErrorCode::internal, "a launch makes other params for " + step.function +
                                       " than its family names, " + step.params.text + ": they differ in " +
                                       what);
}

}  // namespace flashjit
