// An engine with the device beneath it, and the three times from spec to kernel.
#pragma once

#include <optional>
#include <string>

#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/options.hpp"

namespace flashjit::command {

// A private folder in the system's temporary folder. The destructor removes it with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct GetTimes {
  std::optional<double> cold_ms;  // nothing cached: render, compile, load; absent if it was not measured
  std::optional<double> warm_ms;  // a new engine, the kernel on disk; absent without a usable cache
  double hot_us = 0;              // in memory; mean of many
};

// Measures engines of those options from spec to launchable kernel. `first` is an engine's first get of the
// spec. If it compiled, it gives the cold time. Otherwise `cold` asks for that time, which is measured with
// an empty cache in a temporary folder, where there is a compiler.
GetTimes measure_get(const EngineOptions& options, const AttentionSpec& spec, const Shape& shape,
                     const KernelInfo& first, bool cold);
// Mean microseconds of engine.get() for a kernel in memory.
double measure_hot_us(Engine& engine, const AttentionSpec& spec, const Shape& shape);

}  // namespace flashjit::command
