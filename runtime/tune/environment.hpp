// By what this machine's tune records are found and judged.
#pragma once

#include "cache/tune_store.hpp"
#include "runtime/build.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

// `spec` is validated.
TuneKey tune_key(const AttentionSpec& spec, const Target& target, Device device, const Shape& shape);

// Without the compiler, which a process may never open.
TuneEnvironment tune_environment(const EngineOptions& options);

TuneStore tune_store(const OpenedCache& cache);

}  // namespace flashjit
