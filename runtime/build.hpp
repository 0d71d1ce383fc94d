// Spec, target and config to machine code: rendered, then found on disk or compiled and published.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cache/disk_cache.hpp"
#include "codegen/kernel_source.hpp"
#include "codegen/spec.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct BuiltKernel {
  KernelInfo info;
  std::string compiler_identity;  // of the compiler that made it
};

struct OpenedCache {
  std::vector<DiskCache> layers;  // read-only, in the order of search
  std::optional<DiskCache> disk;  // searched after them, and what is built goes there
  std::string note;               // why there is none
};

// What `layers`, else FLASHJIT_CACHE_PATH, lists.
std::vector<std::string> layer_paths(const std::optional<std::string>& layers);

// The cache that `folder` and `layers` name (see EngineOptions). What was asked for, here or in the
// environment, and cannot be used is an error; without the default folder kernels are compiled anew by every
// process.
OpenedCache open_cache(const std::optional<std::string>& folder, const std::optional<std::string>& layers,
                       std::uint64_t max_bytes = 0);

// Throws BadCode (executable.hpp) where the code is to blame.
using CodeLoader = std::function<void(const std::string& code, const std::vector<Step>& steps)>;

// `spec` is validated. Of many callers with one key, in any number of processes that share the folder, one
// compiles.
//
// A layer holds what somebody prebuilt to be used: it is found by its request, whichever compiler made it and
// whether or not one is here. In the folder, code counts if the compiler at hand would make it. Where there
// is no compiler, any that answers the request does. Throws compiler_unavailable if there is none.
//
// Not `may_compile`: as if there were no compiler. Throws not_prebuilt, with the command that helps.
//
// With `load`, what is returned was loaded. An entry whose code is to blame for not loading is passed over;
// in the folder it is set aside, and built anew, where there is a compiler. (Without one it stays: it may be
// that only this host's driver is too old for it.) Whatever else `load` throws ends the build.
BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const OpenedCache& cache, bool may_compile = true, const CodeLoader& load = {});

// The path of an entry for that request in the first of the folders that has one, whichever compiler made it;
// empty if none has. `spec` is validated.
std::string find_prebuilt(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                          const std::vector<DiskCache>& folders);

}  // namespace flashjit
