// An engine with the device beneath it, and the three times from spec to kernel.
#pragma once

#include <optional>
#include <string>

#include "runtime/cuda/memory.hpp"
#include "runtime/flashjit.hpp"
#include "tools/command/options.hpp"

namespace flashjit::command {

// A private folder under the system's temporary one, removed with everything in it.
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
  std::optional<double> cold_ms;  // nothing cached: rendered, compiled, loaded; none without a compiler
  std::optional<double> warm_ms;  // a new engine, the kernel on disk; none if there is no usable cache
  double hot_us = 0;              // in memory; mean of many
};

// From spec to launchable, by engines of those options. `first` is an engine's first get of the spec: if that
// compiled, it is the cold time; otherwise cold is measured in an empty cache of its own.
GetTimes measure_get(const EngineOptions& options, const AttentionSpec& spec, const Shape& shape,
                     const KernelInfo& first);
// Mean microseconds of engine.get() for a kernel that it has.
double measure_hot_us(Engine& engine, const AttentionSpec& spec, const Shape& shape);

}  // namespace flashjit::command
