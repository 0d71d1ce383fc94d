// A size limit for the files of a folder: the least recently used are removed first.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flashjit {

struct Eviction {
  std::size_t removed = 0;  // number of files
  std::uint64_t removed_bytes = 0;
  std::uint64_t left_bytes = 0;  // total size of the remaining files
  // Files that stay beyond the limit, because they were used within the last minute or are in use.
  std::size_t spared = 0;
};

// Records in the file's modification time that the file is
// used now; at most once a minute, and only if permitted.
void mark_used(int file, std::int64_t modified);

// If the named files together are larger than max_bytes, removes the least recently used until nine
// tenths of max_bytes are left. A file that was used within the last minute, or for which in_use() is
// true, stays. A process that has opened a removed file keeps its content. A time in the future, from a
// clock that went wrong, counts as now and is corrected, so that it does not protect a file for ever.
Eviction evict(int folder, const std::vector<std::string>& names, std::uint64_t max_bytes,
               const std::function<bool(const std::string& name)>& in_use);

}  // namespace flashjit
