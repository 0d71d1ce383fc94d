// A cache as one file: entries and tune records in a plain tar, by the names that they have in a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/archive.hpp"
#include "cache/disk_cache.hpp"
#include "cache/tune_store.hpp"

namespace flashjit {

struct Exported {
  std::size_t entries = 0, records = 0;
  std::vector<std::string> left_out;  // damaged files: "path: reason"
};
// Every whole entry and record. Throws cache_failed, with errno's reason, if the sink fails.
Exported export_bundle(const DiskCache& cache, const ByteSink& sink);

struct Imported {
  std::size_t entries = 0, records = 0;
  std::vector<std::string> refused;  // "name: reason"
  std::string damage;                // what ended the reading early; empty: all was read
};
// Publishes what it has verified: members that carry the name, the format version, the checksums and the
// content of an entry or record. Anything else is refused by name: links, devices, absolute and climbing
// paths, foreign and damaged files. Nothing is unpacked by its name.
Imported import_bundle(const DiskCache& cache, const ByteSource& read);

}  // namespace flashjit
