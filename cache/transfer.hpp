// A whole folder to a store, and back.
//
// A store cannot list its objects, so who pushes keeps an index: "index/KEY", for the public key that signs,
// has the names of what was pushed by it, one on each line, and a signature like any object.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cache/disk_cache.hpp"
#include "cache/remote_cache.hpp"
#include "cache/tune_store.hpp"

namespace flashjit {

struct Transferred {
  std::size_t entries = 0, records = 0;  // that were stored
  std::size_t present = 0;               // that were there already
  std::vector<std::string> failed;       // "name: reason"
};

// Stores the folder's entries and records, signed by `key`, 64 hexadecimal digits, where they are unsigned,
// and adds them to its index. Ends early if the store does not answer.
Transferred push_folder(const DiskCache& cache, RemoteCache& remote, const Signer& signer,
                        const std::string& key);

// Keeps what the indexes of the trusted keys name in the folder. A record older than the folder's, if both
// are signed by one key, stays where it is.
Transferred pull_folder(const DiskCache& cache, RemoteCache& remote, const Trust& trust);

// Whether the line of `newer` is of the same key as that of `older` and was made before it.
bool is_step_back(std::string_view newer, std::string_view older);

}  // namespace flashjit
