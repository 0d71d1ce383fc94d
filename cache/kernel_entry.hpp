// A compiled kernel as a cache entry, and back.
#pragma once

#include <optional>
#include <vector>

#include "cache/disk_cache.hpp"
#include "cache/entry_format.hpp"
#include "codegen/kernel_source.hpp"

namespace flashjit {

// Everything that a kernel found on disk needs to be loaded and described.
struct StoredKernel {
  CompiledKernel compiled;  // without assembly
  Target target;
  KernelConfig config;
  std::vector<Step> steps;
};

CacheEntry pack_kernel(const Key& key, const CompiledKernel& compiled, const KernelSource& source);
// Nothing if the metadata is not what pack_kernel writes.
std::optional<StoredKernel> unpack_kernel(CacheEntry entry);
// For lookups: takes an entry's kernel into `kernel`, and finds an entry damaged that describes none.
EntryUse unpack_into(std::optional<StoredKernel>& kernel);

}  // namespace flashjit
