// Converts a compiled kernel to a cache entry, and back.
#pragma once

#include <optional>
#include <vector>

#include "cache/disk_cache.hpp"
#include "cache/entry_format.hpp"
#include "codegen/families/kernel_source.hpp"

namespace flashjit {

// Everything that is needed to load and describe a kernel found on disk.
struct StoredKernel {
  CompiledKernel compiled;  // without assembly
  Target target;
  KernelConfig config;
  std::vector<Step> steps;
};

CacheEntry pack_kernel(const CacheKey& key, const CompiledKernel& compiled, const KernelSource& source);
// Nothing if pack_kernel() would not write such metadata.
std::optional<StoredKernel> unpack_kernel(CacheEntry entry);
// For lookups: moves an entry's kernel into `kernel`; an entry that describes no kernel is damaged.
EntryUse unpack_into(std::optional<StoredKernel>& kernel);

}  // namespace flashjit
