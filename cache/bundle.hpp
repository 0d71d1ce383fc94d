// A cache as one file: a plain tar of entries and tune
// records under the names that they have in a cache folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/archive.hpp"
#include "cache/disk_cache.hpp"
#include "cache/tune_store.hpp"

namespace flashjit {

// The tune records in the cache's folder, with its verifier and signer.
TuneStore records_of(const DiskCache& cache);

struct Exported {
  std::size_t entries = 0, records = 0;
  std::vector<std::string> left_out;  // damaged files, as "path: reason"
};
// Writes every undamaged entry and record. Throws cache_failed, with errno's reason, if the sink fails.
Exported export_bundle(const DiskCache& cache, const ByteSink& sink);

struct Imported {
  std::size_t entries = 0, records = 0;
  std::vector<std::string> refused;  // members, as "name: reason"
  std::string damage;                // why reading ended early; empty if everything was read
};
// Publishes the members whose name, format version, checksums and content are those of an entry
// or record. All other members are refused by name: links, devices, absolute and climbing
// paths, foreign and damaged files. No member is ever unpacked to the path that it names.
Imported import_bundle(const DiskCache& cache, const ByteSource& read);

}  // namespace flashjit
