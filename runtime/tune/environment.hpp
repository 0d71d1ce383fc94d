// The key and environment by which tune records are found and judged on this machine.
#pragma once

#include "cache/tune_store.hpp"
#include "runtime/build.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// `spec` is validated.
TuneKey tune_key(const AttentionSpec& spec, const Target& target, Device device, const Shape& shape);

// The environment without the compiler, which a process may never open.
TuneEnvironment tune_environment(const EngineOptions& options);

TuneStore tune_store(const OpenedCache& cache);

}  // namespace flashjit
