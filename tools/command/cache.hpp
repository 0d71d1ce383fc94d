// The parts that the actions of `flashjit cache` share.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cache/disk_cache.hpp"
#include "tools/command/arguments.hpp"
#include "tools/command/report.hpp"

namespace flashjit::command {

struct CacheOptions {
  std::optional<std::string> folder, layers;
  bool json = false;

  // Throws cache_failed if there is no folder. A folder given by name must exist, unless `made` is true; only
  // then one that is missing is made.
  DiskCache cache(bool made = false) const;
  // In the order of search: the layers, then cache(), which a host with layers need not have.
  std::vector<DiskCache> folders() const;
};

// An action of `flashjit cache`. `add` declares its options and returns the function that runs it.
using CacheAction = std::function<int(const CacheOptions&)>;
CacheAction add_explain(const Arguments& app);
CacheAction add_export(const Arguments& app);
CacheAction add_import(const Arguments& app);
CacheAction add_pull(const Arguments& app);
CacheAction add_push(const Arguments& app);
CacheAction add_sync(const Arguments& app);
CacheAction add_keygen(const Arguments& app);
CacheAction add_sign(const Arguments& app);
CacheAction add_trust(const Arguments& app);

// Stores the folder's content in the remote stores, FLASHJIT_CACHE_REMOTE if absent, signed with the key of
// that file, FLASHJIT_SIGNING_KEY if empty, and reports it. Returns the exit code.
int push_cache(const DiskCache& cache, const std::optional<std::string>& remote, const std::string& key_file,
               bool json);

// The key's field of that name; empty if there is none.
std::string field(const CacheKey& key, std::string_view label);
Json fields_json(const CacheKey& key);

}  // namespace flashjit::command
