// Spec, target and config to machine code: rendered, then found on disk or compiled and published.
#pragma once

#include <string>
#include <vector>

#include "cache/disk_cache.hpp"
#include "codegen/kernel_source.hpp"
#include "codegen/spec.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct BuiltKernel {
  KernelInfo info;
  std::string code;
  std::vector<Step> steps;
};

struct OpenedCache {
  std::optional<DiskCache> disk;
  std::string note;  // why there is none
};

// The cache that `folder` names (see EngineOptions::cache_dir). One that was asked for, here or in
// FLASHJIT_CACHE_DIR, and cannot be used is an error; without the default one kernels are compiled anew by
// every process.
OpenedCache open_cache(const std::optional<std::string>& folder);

// `spec` is validated. Of many callers with one key, in any number of processes that share the folder, one
// compiles.
BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const OpenedCache& cache);

}  // namespace flashjit
