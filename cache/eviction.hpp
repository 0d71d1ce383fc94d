// A size cap for the files of a folder: those that were used least recently go first.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace flashjit {

struct Eviction {
  std::size_t removed = 0;  // files
  std::uint64_t removed_bytes = 0;
  std::uint64_t left_bytes = 0;  // of the named files
};

// Notes in the file's modification time that it is in use; at most once a minute, and only if we may.
void mark_used(int file, std::int64_t modified);

// Removes some of the named files, if they are larger than max_bytes together, until nine tenths of that are
// left. A file that was used within the last minute or of which in_use() is true stays. Whoever has opened a
// file keeps it. Times from the future, of a clock that went wrong, count as now and are corrected, so that
// they keep nothing for ever.
Eviction evict(int folder, const std::vector<std::string>& names, std::uint64_t max_bytes,
               const std::function<bool(const std::string& name)>& in_use);

}  // namespace flashjit
