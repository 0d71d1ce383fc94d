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

// `spec` is validated, `cache` may be null. Of many callers with one key, in any number of processes that share the
// folder, one compiles.
BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const DiskCache* cache);

// The cache that `folder` names (see EngineOptions::cache_dir); none for an empty name.
std::optional<DiskCache> open_cache(const std::optional<std::string>& folder);

}  // namespace flashjit
