// Files in a folder that many processes share, as entries and tune records are kept: read through one
// descriptor that was checked (trust.hpp), published by rename, set aside when damaged.
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

// The folder `name` in `parent` (AT_FDCWD: a path), made like its parent if it is missing and `create` is
// set. None, with the reason in *why where there is one, if others could write to it; without a reason it is
// just not there.
File open_folder(int parent, const std::string& name, bool create, std::string* why);

// The folder at `path`, as prepare_folder() gave it; made again if it was removed and `create` is set.
File open_cache_folder(const std::string& path, bool create, std::string* why);

// Names in a folder, but "." and "..".
void for_each_name(int folder, const std::function<void(std::string_view name)>& visit);
std::vector<std::string> names_in(int folder);

// What reading a file found. `damaged`: its bytes are wrong, as opposed to not being readable.
struct Finding {
  std::string reason;  // empty: all is well
  bool damaged = false;
};

using FileReader = std::function<Finding(int file, const struct stat& status)>;

// What `read` finds in the open file `name`, or why it was not given to it; none where there is no such file.
std::optional<Finding> inspect_file(int folder, const std::string& name, const FileReader& read,
                                    struct stat* found = nullptr);

// The same for use: true if nothing is wrong with the file. Otherwise *why says which and what, or is empty
// where there is no such file. What is damaged, or something else in a file's place, is moved to quarantine/
// if `may_move` is set.
bool read_file(int folder, const std::string& name, bool may_move, const FileReader& read, std::string* why);

// Written to tmp/, flushed, renamed. False with the reason in *why; then nothing is left behind.
bool publish_file(int folder, const std::string& name, const std::string& bytes, std::string* why);

// Removes what dead writers left in a folder's tmp/; returns how many files.
std::size_t remove_unfinished(int folder, std::string* why);

inline void tell(std::string* why, std::string reason) {
  if (why) *why = std::move(reason);
}

}  // namespace flashjit
