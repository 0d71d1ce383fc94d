#include "runtime/kernel.hpp"

#include <nlohmann/json.hpp>

#include "codegen/base/float_state.hpp"

namespace flashjit {

struct PreparedLaunch::Impl {
  Launch launch;
  Device device;
  const Executable* executable;
};

namespace {

void require_stream(Device device, Stream stream) {
  if (device.kind == Device::Kind::cpu && stream)
    throw Error(ErrorCode::invalid_argument,
                "a stream was given to a CPU kernel, which has finished when its launch returns: pass none");
}

}  // namespace

std::string to_json(const KernelInfo& info) {
  const DefaultFloatState state;
  auto steps = nlohmann::ordered_json::array();
  for (const StepInfo& step : info.steps)
    steps.push_back({{"entry", step.function},
                     {"registers", step.registers},
                     {"spill_bytes", step.spill_bytes},
                     {"shared_memory", step.shared_memory}});
  return nlohmann::ordered_json{{"spec", nlohmann::ordered_json::parse(info.spec.to_json())},
                                {"target", info.target.str()},
                                {"config", nlohmann::ordered_json::parse(to_json(info.config))},
                                {"config_source", to_string(info.config_source)},
                                {"config_note", info.config_note},
                                {"cache_key", info.cache_key},
                                {"path", info.path},
                                {"cache_note", info.cache_note},
                                {"origin", to_string(info.origin)},
                                {"compiler", info.compiler},
                                {"steps", steps},
                                {"registers", info.registers},
                                {"spill_bytes", info.spill_bytes},
                                {"shared_memory", info.shared_memory},
                                {"compile_ms", info.compile_ms},
                                {"get_ms", info.get_ms},
                                {"log", info.log},
                                // Their names in version 0.1.
                                {"key", info.cache_key},
                                {"smem_bytes", info.shared_memory}}
      .dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

Kernel::Kernel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Kernel::~Kernel() = default;

const KernelInfo& Kernel::info() const noexcept {
  return impl_->info;
}
const std::string& Kernel::info_json() const noexcept {
  return impl_->info_json;
}

std::size_t Kernel::workspace_bytes(const Shape& shape) const {
  const DefaultFloatState state;
  return impl_->operation().workspace_bytes(impl_->planned(), shape);
}

void Kernel::launch(const AttentionArgs& args, Stream stream) const {
  require_stream(impl_->device, stream);
  Launch launch;
  impl_->plan(args, launch);
  impl_->executable->launch(launch, stream);
}

PreparedLaunch Kernel::prepare(const AttentionArgs& args) const {
  auto prepared = std::make_unique<PreparedLaunch::Impl>();
  prepared->device = impl_->device;
  prepared->executable = impl_->executable.get();
  impl_->plan(args, prepared->launch);
  return PreparedLaunch(std::move(prepared));
}

PreparedLaunch::PreparedLaunch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PreparedLaunch::PreparedLaunch(PreparedLaunch&&) noexcept = default;
PreparedLaunch& PreparedLaunch::operator=(PreparedLaunch&&) noexcept = default;
PreparedLaunch::~PreparedLaunch() = default;

void PreparedLaunch::launch(Stream stream) const {
  require_stream(impl_->device, stream);
  impl_->executable->launch(impl_->launch, stream);
}

}  // namespace flashjit
