#include "runtime/workspace.hpp"

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/cuda/memory.hpp"

namespace flashjit {

struct Workspace::Impl {
  Impl(Device on, std::size_t size) : device(on), bytes(size) {
    if (device.kind == Device::Kind::cuda) {
      context = std::make_unique<cuda::Context>(device.index);
      on_device = cuda::DeviceBuffer(*context, bytes);
    } else if (bytes > 0) {
      constexpr std::size_t line = 64;
      on_host.reset(bytes > PTRDIFF_MAX - line ? nullptr
                                               : std::aligned_alloc(line, (bytes + line - 1) / line * line));
      if (!on_host)
        throw Error(ErrorCode::device_failed,
                    "a workspace of " + std::to_string(bytes) + " bytes: the host is out of memory");
    }
  }

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  const Device device;
  const std::size_t bytes;
  std::unique_ptr<void, Free> on_host;
  std::unique_ptr<cuda::Context> context;  // before the buffer, which borrows it
  cuda::DeviceBuffer on_device;
};

Workspace::Workspace(Device device, std::size_t bytes) : impl_(std::make_unique<Impl>(device, bytes)) {}
Workspace::Workspace(const Engine& engine, const Kernel& kernel, const Shape& largest)
    : Workspace(engine.device(), kernel.workspace_bytes(largest)) {}
Workspace::Workspace(Workspace&&) noexcept = default;
Workspace& Workspace::operator=(Workspace&&) noexcept = default;
Workspace::~Workspace() = default;

std::size_t Workspace::bytes() const noexcept {
  return impl_->bytes;
}

Tensor Workspace::tensor() const noexcept {
  Tensor tensor{.data = impl_->context ? impl_->on_device.data() : impl_->on_host.get(),
                .dtype = DType::uint8,
                .device = impl_->device,
                .rank = 1};
  tensor.shape[0] = static_cast<std::int64_t>(impl_->bytes);
  tensor.strides[0] = 1;
  return tensor;
}

struct EngineStep::Impl {
  struct Added {
    const Kernel* kernel;
    AttentionArgs args;
    std::deque<std::string> names;
    std::vector<NamedArgument> named;        // of `names`; args.named refers to it
    std::optional<PreparedLaunch> prepared;  // on a GPU; a CPU divides its work by the lengths of the moment
  };
  Device device;
  std::vector<Workspace> workspaces;
  std::vector<std::unique_ptr<const Added>> launches;
};

EngineStep::EngineStep(const Engine& engine) : impl_(new Impl{engine.device(), {}, {}}) {}
EngineStep::EngineStep(EngineStep&&) noexcept = default;
EngineStep& EngineStep::operator=(EngineStep&&) noexcept = default;
EngineStep::~EngineStep() = default;

void EngineStep::add(const Kernel& kernel, const AttentionArgs& args, const Shape& largest) {
  auto added = std::make_unique<Impl::Added>(Impl::Added{&kernel, args, {}, {}, std::nullopt});
  for (const NamedArgument& argument : args.named) {
    added->named.push_back(argument);
    added->named.back().name = added->names.emplace_back(argument.name);
  }
  added->args.named = added->named;
  std::optional<Workspace> own;
  if (const std::size_t bytes = args.workspace ? 0 : kernel.workspace_bytes(largest); bytes > 0)
    added->args.workspace = own.emplace(impl_->device, bytes).tensor();
  PreparedLaunch checked = kernel.prepare(added->args);
  if (impl_->device.kind == Device::Kind::cuda) added->prepared = std::move(checked);
  impl_->workspaces.reserve(impl_->workspaces.size() + 1);
  impl_->launches.push_back(std::move(added));
  if (own) impl_->workspaces.push_back(std::move(*own));
}

void EngineStep::launch(Stream stream) const {
  for (const auto& added : impl_->launches) {
    if (added->prepared)
      added->prepared->launch(stream);
    else
      added->kernel->launch(added->args, stream);
  }
}

}  // namespace flashjit
