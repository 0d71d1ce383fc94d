#include "cache/folder.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "cache/fork.hpp"
#include "cache/trust.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

constexpr std::size_t max_quarantine = 16;

// Moves a damaged file to quarantine/. Returns false if the file stays, which remains a
// miss: the folder cannot be written, or another process has put a good file in its place.
bool set_aside(int folder, const std::string& name, const struct stat& damaged) {
  const File quarantine = open_folder(folder, "quarantine", true, nullptr);
  struct stat now;
  if (!quarantine || ::fstatat(folder, name.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0 ||
      now.st_ino != damaged.st_ino)
    return false;

  std::vector<std::pair<std::int64_t, std::string>> kept;  // with the time of arrival
  for (const std::string& other : names_in(quarantine.get())) {
    struct stat status;
    if (::fstatat(quarantine.get(), other.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
      kept.emplace_back(status.st_ctime, other);
    }
  }
  std::sort(kept.begin(), kept.end());
  for (std::size_t i = 0; i + max_quarantine <= kept.size(); ++i) {
    ::unlinkat(quarantine.get(), kept[i].second.c_str(), 0);
  }
  const std::string there = name + "." + std::to_string(damaged.st_ino);
  return ::renameat(folder, name.c_str(), quarantine.get(), there.c_str()) == 0;
}

// A file that is being written in tmp/. It is locked while its
// writer lives, and removed unless it was moved to its place.
class Temporary {
 public:
  explicit Temporary(int folder) : folder_(folder) {
    for (int attempt = 0; attempt < 16; ++attempt) {
      std::uint64_t random = 0;
      if (::getrandom(&random, sizeof random, 0) != sizeof random) return;
      name_ = std::to_string(random);
      file_ = HeldFile([&] {
        return ::openat(folder_, name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
      });
      if (!file_ && errno == EEXIST) continue;
      if (!file_) return;
      // On a file system without locks no file is ever locked, and remove_stale() takes none for stale.
      ::flock(file_.get(), LOCK_EX);
      // Another process's remove_stale() may have removed the file between creation and lock.
      struct stat status;
      if (::fstat(file_.get(), &status) == 0 && status.st_nlink > 0) return;
      file_ = HeldFile();
      // On a busy machine it may win many times in a row; longer and longer pauses end that.
      std::this_thread::sleep_for(std::chrono::microseconds(10 << attempt));
      errno = EEXIST;
    }
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (file_.is_ours()) ::unlinkat(folder_, name_.c_str(), 0);
  }

  explicit operator bool() const { return static_cast<bool>(file_); }

  // Returns false with errno.
  bool write(const std::string& bytes, Flush flush) {
    // The file is flushed because file systems may report a full disk or quota only
    // then. The folder is not flushed: a power cut may lose the rename, and so an
    // entry, but nothing else; any other damage by a power cut fails a checksum.
    return write_fully(file_.get(), bytes.data(), bytes.size()) &&
           (flush == Flush::no || ::fdatasync(file_.get()) == 0);
  }
  bool move_to(int folder, const std::string& name) {
    if (::renameat(folder_, name_.c_str(), folder, name.c_str()) != 0) return false;
    file_ = HeldFile();
    return true;
  }

  // Removes the files of dead writers; returns how many.
  static std::size_t remove_stale(int folder) {
    std::size_t removed = 0;
    for (const std::string& name : names_in(folder)) {
      const File file(::openat(folder, name.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
      if (file && ::flock(file.get(), LOCK_EX | LOCK_NB) == 0 && ::unlinkat(folder, name.c_str(), 0) == 0)
        ++removed;
    }
    return removed;
  }

 private:
  int folder_;
  std::string name_;
  HeldFile file_;
};

}  // namespace

File open_folder(int parent, const std::string& name, bool create, std::string* why) {
  constexpr int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
  File folder(::openat(parent, name.c_str(), flags));
  if (!folder && errno == ENOENT) {
    if (!create) return {};
    struct stat status;
    if (::fstat(parent, &status) == 0 &&
        (::mkdirat(parent, name.c_str(), status.st_mode & 0755) == 0 || errno == EEXIST)) {
      folder = File(::openat(parent, name.c_str(), flags));
    }
  }
  struct stat status;
  if (!folder || ::fstat(folder.get(), &status) != 0) {
    tell(why, "folder " + name + ": " + error_text(errno));
    return {};
  }
  if (const std::string reason = distrust(status); !reason.empty()) {
    tell(why, "folder " + name + ": " + reason);
    return {};
  }
  return folder;
}

File open_cache_folder(const std::string& path, bool create, std::string* why) {
  try {
    if (create && ::access(path.c_str(), F_OK) != 0) prepare_folder(path);
  } catch (const Error& error) {
    tell(why, error.message());
    return {};
  }
  return open_folder(AT_FDCWD, path, false, why);
}

void for_each_name(int folder, const std::function<void(std::string_view name)>& visit) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(
      ::fdopendir(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), &::closedir);
  if (!stream) return;
  while (const dirent* item = ::readdir(stream.get())) {
    const std::string_view name = item->d_name;
    if (name != "." && name != "..") visit(name);
  }
}

std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  for_each_name(folder, [&](std::string_view name) { names.emplace_back(name); });
  return names;
}

std::optional<Finding> inspect_file(int folder, const std::string& name, const FileReader& read,
                                    struct stat* found) {
  struct stat status;
  if (!found) found = &status;
  // O_NONBLOCK: never waits for a FIFO. O_NOFOLLOW: never follows a link.
  if (const File file{::openat(folder, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)}) {
    if (::fstat(file.get(), found) != 0) return Finding{error_text(errno), false};
    if (!S_ISREG(found->st_mode)) return Finding{"not a regular file", true};
    if (std::string reason = distrust(*found); !reason.empty()) return Finding{std::move(reason), true};
    return read(file.get(), *found);
  }
  // A symbolic link (ELOOP) or a socket (ENXIO) in the file's place
  // is reported as damage; any other error is not the file's fault.
  const int error = errno;
  if (error == ENOENT) return std::nullopt;
  if ((error == ELOOP || error == ENXIO) && ::fstatat(folder, name.c_str(), found, AT_SYMLINK_NOFOLLOW) == 0)
    return Finding{"not a regular file", true};
  return Finding{error_text(error), false};
}

bool read_file(int folder, const std::string& name, bool may_move, const FileReader& read, std::string* why) {
  tell(why, {});
  struct stat status;
  const std::optional<Finding> finding = inspect_file(folder, name, read, &status);
  if (!finding) return false;
  if (finding->reason.empty()) return true;
  const bool moved = finding->damaged && may_move && set_aside(folder, name, status);
  tell(why, name + (moved ? " was set aside: " : " cannot be used: ") + finding->reason);
  return false;
}

bool publish_file(int folder, const std::string& name, const std::string& bytes, std::string* why,
                  Flush flush) {
  const File temporaries = open_folder(folder, "tmp", true, why);
  if (!temporaries) return false;
  Temporary::remove_stale(temporaries.get());
  Temporary file(temporaries.get());
  if (file && file.write(bytes, flush) && file.move_to(folder, name)) return true;
  tell(why, error_text(errno));
  return false;
}

bool asks_for_signatures(int folder, const std::string& path) {
  return ::faccessat(folder, (path + "/signed").c_str(), F_OK, 0) == 0 || errno != ENOENT;
}

std::size_t remove_unfinished(int folder, std::string* why) {
  const File temporaries = open_folder(folder, "tmp", false, why);
  return temporaries ? Temporary::remove_stale(temporaries.get()) : 0;
}

}  // namespace flashjit
