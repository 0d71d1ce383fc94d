// Memory for launches whose callers bring none, and the launches of an engine's step, prepared once.
#pragma once

#include <cstddef>
#include <memory>

#include "flashjit.hpp"

namespace flashjit {

// Memory of a device that one launch at a time may use as its workspace, aligned for every kernel. The size
// is fixed, so that prepared launches and CUDA graphs may hold it. It must outlast them, and its destructor
// does not wait for them.
class FLASHJIT_API Workspace {
 public:
  // Throws device_failed if the memory cannot be had.
  Workspace(Device device, std::size_t bytes);
  // For launches of the kernel up to these sizes, on the engine's device.
  Workspace(const Engine& engine, const Kernel& kernel, const Shape& largest);
  Workspace(Workspace&&) noexcept;
  Workspace& operator=(Workspace&&) noexcept;
  ~Workspace();

  std::size_t bytes() const noexcept;
  // uint8 [bytes], for AttentionArgs::workspace. Valid as long as the workspace.
  Tensor tensor() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The launches of one step of a serving loop, such as append_kv and decode of each layer, on tensors that
// stay where they are. Lengths, positions and page tables are read again at each launch, so they may change
// between launches; sizes and addresses may not. On a GPU the launches are checked and encoded once, and
// launch() can be captured in a CUDA graph. On a CPU lengths are checked and the work is divided at each
// launch, which allocates nothing. Launches of one step must not overlap, since they share its workspaces.
class FLASHJIT_API EngineStep {
 public:
  explicit EngineStep(const Engine& engine);
  EngineStep(EngineStep&&) noexcept;
  EngineStep& operator=(EngineStep&&) noexcept;
  ~EngineStep();

  // Adds a launch after those that it has, of a kernel of the engine. Without args.workspace the step keeps
  // one for sizes up to `largest`. Throws what Kernel::prepare() throws.
  void add(const Kernel& kernel, const AttentionArgs& args, const Shape& largest);
  // Throws invalid_argument for lengths that no longer fit, and device_failed.
  void launch(Stream stream = nullptr) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashjit
