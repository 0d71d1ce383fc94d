// From spec, target and config to machine code: the source is
// rendered, then the code is found on disk, or compiled and published.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/disk_cache.hpp"
#include "cache/remote_cache.hpp"
#include "codegen/families/kernel_source.hpp"
#include "codegen/spec/spec.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit {

struct BuiltKernel {
  KernelInfo info;
  std::string compiler_identity;  // identity of the compiler that made the code
};

struct OpenedCache {
  std::vector<DiskCache> layers;        // read-only, in the order of search
  std::optional<DiskCache> disk;        // searched after the layers; new kernels are written here
  std::string note;                     // why `disk` is absent
  Verifier verifier;                    // of signatures, by the keys that are trusted
  Signer signer;                        // empty without a key to sign with
  std::shared_ptr<RemoteCache> remote;  // searched after `disk`; null without stores
};

// An engine's options for stores and signatures; see EngineOptions.
struct StoreOptions {
  std::optional<std::string> remote, trust, signing_key;
};
StoreOptions store_options(const EngineOptions& options);

// The folders that `layers` lists; FLASHJIT_CACHE_PATH if it is absent.
std::vector<std::string> layer_paths(const std::optional<std::string>& layers);

// Opens the cache that `folder` and `layers` name (see EngineOptions). Throws cache_failed
// if a folder named here or in the environment cannot be used. If the default folder
// cannot be used, there is no disk cache and every process compiles its kernels.
OpenedCache open_cache(const std::optional<std::string>& folder, const std::optional<std::string>& layers,
                       std::uint64_t max_bytes = 0, const StoreOptions& stores = {});

// Loads the code. Throws BadCode (executable.hpp) if the code is to blame for a failure.
using CodeLoader = std::function<void(const std::string& code, const std::vector<Step>& steps)>;

// Builds or finds a kernel; `spec` is validated. If many callers want the same
// key, in any number of processes that share the folder, one of them compiles.
//
// A layer holds kernels that somebody prebuilt to be used. They are found by their request,
// whichever compiler made them and whether or not this host has a compiler. In the writable
// folder, with a compiler, only code counts that this compiler would make; without a compiler, any
// code for the request counts. Throws compiler_unavailable if a compiler is needed and missing.
//
// A remote store is asked after the folders: for what this compiler would make, or, without a compiler, for
// any code of the request. What it gives is kept in the writable folder. If it has none, one of all hosts
// with a key to sign with compiles, and the others wait for it, at most a minute.
//
// `may_compile` false: the same as without a compiler, but throws not_prebuilt with the command that helps.
//
// A compilation that goes beyond `limits` or is cancelled, or waiting for one that is, throws and releases
// the key's lock.
//
// `on_wait` is called when another process is found to build the kernel, which is then waited for.
//
// `load`, if given, has loaded the returned code. An entry whose code is to blame for failing to load is
// passed over. In the writable folder, with a compiler, it is also set aside and built anew. (Without a
// compiler it stays: perhaps only this host's driver is too old for it.) Any other exception of `load` ends
// the build.
BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const OpenedCache& cache, bool may_compile = true, const CodeLoader& load = {},
                         const CompileLimits& limits = {}, const std::function<void()>& on_wait = {});

// The path of the first folder's entry for the request, whichever
// compiler made it; empty if no folder has one. `spec` is validated.
std::string find_prebuilt(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                          const std::vector<DiskCache>& folders);

// The text of a request for the kernel, which a store that compiles takes by POST (tools/serve/):
//
//   {"version": "0.1.0", "spec": {...}, "target": "sm_90a", "config": {...},
//    "request": "<digest of request_key()>"}
//
// The digest says whether the store's flashjit makes the same text as this one, whatever their versions.
std::string compile_request_text(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                                 const std::string& request_digest);

// Whether a store has any entry for the request.
Answer stored_remotely(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                       RemoteCache& remote, std::string& why);

}  // namespace flashjit
