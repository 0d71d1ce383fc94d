// Files in a folder that many processes share, such as entries and tune records. A file is read through
// one descriptor that was checked (trust.hpp), published by rename, and set aside if it is damaged.
//
//   FOLDER/NAME          a file; appears by rename, whole or not at all
//   FOLDER/tmp/          files being written
//   FOLDER/quarantine/   damaged files, kept for inspection: the newest 16
#pragma once

#include <sys/stat.h>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/file.hpp"

namespace flashjit {

// Opens the folder `name` in `parent` (AT_FDCWD: a path). If it is missing and `create`
// is set, it is made with its parent's permissions. Returns none if others could write
// to it, with the reason in *why; without a reason the folder is merely missing.
File open_folder(int parent, const std::string& name, bool create, std::string* why);

// Opens the folder at `path`, as prepare_folder() returned
// it; makes it again if it was removed and `create` is set.
File open_cache_folder(const std::string& path, bool create, std::string* why);

// The names in a folder, except "." and "..".
void for_each_name(int folder, const std::function<void(std::string_view name)>& visit);
std::vector<std::string> names_in(int folder);

// The result of reading a file. `damaged`: its bytes are wrong, as opposed to unreadable.
struct Finding {
  std::string reason;  // empty: all is well
  bool damaged = false;
};

using FileReader = std::function<Finding(int file, const struct stat& status)>;

// Opens the file `name` and returns the finding of `read`, or
// why `read` was not called; none if there is no such file.
std::optional<Finding> inspect_file(int folder, const std::string& name, const FileReader& read,
                                    struct stat* found = nullptr);

// Like inspect_file(), for use: returns true if nothing is wrong with the file. Otherwise
// *why names the file and the problem; it is empty if there is no such file. A damaged
// file, or something else in a file's place, is moved to quarantine/ if `may_move` is set.
bool read_file(int folder, const std::string& name, bool may_move, const FileReader& read, std::string* why);

// Whether a file is flushed before it appears. Without, a full disk may show only when it is read, as damage.
enum class Flush { yes, no };

// Writes the file to tmp/, flushes and renames it. On failure
// returns false with the reason in *why and leaves nothing behind.
bool publish_file(int folder, const std::string& name, const std::string& bytes, std::string* why,
                  Flush flush = Flush::yes);

// Whether the cache folder at `path` from the open folder asks for signatures (disk_cache.hpp).
bool asks_for_signatures(int folder, const std::string& path);

// Removes the files of dead writers in a folder's tmp/; returns how many.
std::size_t remove_unfinished(int folder, std::string* why);

inline void tell(std::string* why, std::string reason) {
  if (why) *why = std::move(reason);
}

}  // namespace flashjit
