#include "runtime/executable.hpp"

namespace flashjit {
namespace {

void require_bytes(const Step& step, const char* which, std::size_t kernels, std::size_t launches) {
  if (kernels == launches) return;
  throw Error(ErrorCode::internal, "the machine code of " + step.function + " takes " + which +
                                       " params of " + std::to_string(kernels) +
                                       " bytes, and launches make " + std::to_string(launches) +
                                       ": its family and its text disagree on their type");
}

}  // namespace

void Executable::require_params(const Step& step, std::size_t bytes, std::size_t second_bytes) {
  // Tests load kernels of their own, which no family describes.
  if (step.params.own == nullptr) return;
  require_bytes(step, "first", bytes, step.params.bytes);
  require_bytes(step, "second", second_bytes, step.params.second_bytes);
}

void Executable::refuse_steps(std::size_t launched) const {
  std::string names;
  for (const Step& step : steps_) names += (names.empty() ? "" : ", ") + step.function;
  throw Error(ErrorCode::internal, "the launch has " + std::to_string(launched) + " steps, and the kernel " +
                                       std::to_string(steps_.size()) + ": " + names);
}

}  // namespace flashjit
