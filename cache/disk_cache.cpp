#include "cache/disk_cache.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <thread>

#include "cache/trust.hpp"
#include "codegen/digest.hpp"
#include "codegen/error.hpp"

namespace flashjit {
namespace {

const std::string store_name = "v" + std::to_string(entry_format_version);
constexpr std::string_view entry_suffix = ".kernel";
constexpr std::size_t max_quarantine = 16;

std::string entry_name(const Key& key) {
  return key.digest() + std::string(entry_suffix);
}

bool is_entry_name(std::string_view name) {
  return name.size() == digest_size + entry_suffix.size() && name.ends_with(entry_suffix) &&
         name.find_first_not_of("0123456789abcdef") == digest_size;
}

void tell(std::string* why, std::string reason) {
  if (why) *why = std::move(reason);
}

// The folder `name` in `parent`, made like its parent if it is missing and `create` is set. Without a reason
// in `why` it is just not there.
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

// Where the entries are: FOLDER/v1.
File open_store(const std::string& folder_path, bool create, std::string* why) {
  try {
    if (create && ::access(folder_path.c_str(), F_OK) != 0) prepare_folder(folder_path);
  } catch (const Error& error) {
    tell(why, error.message());
    return {};
  }
  const File folder = open_folder(AT_FDCWD, folder_path, false, why);
  return folder ? open_folder(folder.get(), store_name, create, why) : File();
}

// Names in a folder, but "." and "..".
std::vector<std::string> names_in(int folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(
      ::fdopendir(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), &::closedir);
  if (!stream) return names;
  while (const dirent* item = ::readdir(stream.get())) {
    const std::string name = item->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

// Renames a damaged file out of the way. A folder that cannot be written keeps it: it stays a miss.
void set_aside(int store, const std::string& name, const struct stat& damaged) {
  const File quarantine = open_folder(store, "quarantine", true, nullptr);
  struct stat now;
  // Somebody may have put a good entry in its place already.
  if (!quarantine || ::fstatat(store, name.c_str(), &now, AT_SYMLINK_NOFOLLOW) != 0 ||
      now.st_ino != damaged.st_ino)
    return;

  std::vector<std::pair<std::int64_t, std::string>> kept;  // by time of arrival
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
  ::renameat(store, name.c_str(), quarantine.get(), there.c_str());
}

// Reads and checks one entry's file. Returns what is wrong with it, or nothing. `unreadable`: nothing can be
// said about the file, since reading it failed.
std::string read_entry(int file, const struct stat& status, bool with_payload, CacheEntry& entry,
                       bool& unreadable) {
  if (!S_ISREG(status.st_mode)) return "not a regular file";
  if (std::string reason = distrust(status); !reason.empty()) return reason;
  int error = 0;
  const auto source = [&](char* to, std::size_t size) {
    const bool complete = read_fully(file, to, size);
    if (!complete) error = errno;
    return complete;
  };
  std::string damage = decode_entry(static_cast<std::uint64_t>(status.st_size), source, with_payload, entry);
  unreadable = error != 0;
  return unreadable ? error_text(error) : damage;
}

// O_NONBLOCK: a FIFO must not make us wait.
File open_entry(int store, const std::string& name) {
  return File(::openat(store, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
}

// A file being written in tmp/, locked for as long as its writer lives, removed unless it was moved to its
// place.
class Temporary {
 public:
  explicit Temporary(int folder) : folder_(folder) {
    for (int attempt = 0; attempt < 16; ++attempt) {
      std::uint64_t random = 0;
      if (::getrandom(&random, sizeof random, 0) != sizeof random) return;
      name_ = std::to_string(random);
      file_ =
          File(::openat(folder_, name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
      if (!file_ && errno == EEXIST) continue;
      if (!file_) return;
      // Where locks are not supported, nobody's are, and nothing is taken for stale.
      ::flock(file_.get(), LOCK_EX);
      // A cleaner may have come between creation and lock.
      struct stat status;
      if (::fstat(file_.get(), &status) == 0 && status.st_nlink > 0) return;
      file_ = File();
      errno = EEXIST;
    }
  }
  Temporary(const Temporary&) = delete;
  Temporary& operator=(const Temporary&) = delete;
  ~Temporary() {
    if (file_) ::unlinkat(folder_, name_.c_str(), 0);
  }

  explicit operator bool() const { return static_cast<bool>(file_); }

  // False with errno.
  bool write(const std::string& bytes) {
    // Going over this limit would raise SIGXFSZ, which ends the host process.
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes.size() > limit.rlim_cur) {
      errno = EFBIG;
      return false;
    }
    // Flushed because file systems report a full disk or quota as late as here. The folder is not: losing the
    // rename in a power cut loses an entry, nothing else, and whatever else a power cut leaves fails its
    // checksum.
    return write_fully(file_.get(), bytes.data(), bytes.size()) && ::fdatasync(file_.get()) == 0;
  }
  bool move_to(int folder, const std::string& name) {
    if (::renameat(folder_, name_.c_str(), folder, name.c_str()) != 0) return false;
    file_ = File();
    return true;
  }

  // Removes what dead writers left; returns how many files.
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
  File file_;
};

// 63 bits of the digest. Two keys that share them wait for each other in vain, once in 10^18 pairs.
std::int64_t lock_offset(const Key& key) {
  return static_cast<std::int64_t>(std::stoull(key.digest().substr(0, 16), nullptr, 16) >> 1);
}

// Open file description locks: they exclude threads as well as processes, and unlike POSIX record locks
// survive somebody else in the process closing the same file.
bool set_lock(int file, short type, std::int64_t offset) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = offset;
  range.l_len = 1;
  return ::fcntl(file, F_OFD_SETLK, &range) == 0;
}

}  // namespace

KeyLock& KeyLock::operator=(KeyLock&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(offset_, other.offset_);
  std::swap(process_, other.process_);
  return *this;
}

KeyLock::~KeyLock() {
  // Closing is not enough: a child forked meanwhile shares the lock. And that child must not end it for us.
  if (file_ && process_ == ::getpid()) set_lock(file_.get(), F_UNLCK, offset_);
}

std::string DiskCache::default_folder() {
  const auto variable = [](const char* name) {
    const char* value = ::secure_getenv(name);
    return std::string(value ? value : "");
  };
  if (std::string folder = variable("FLASHJIT_CACHE_DIR"); !folder.empty()) return folder;
  // Relative ones are to be ignored, says the XDG base directory specification.
  if (const std::string folder = variable("XDG_CACHE_HOME"); folder.starts_with('/'))
    return folder + "/flashjit";
  if (const std::string folder = variable("HOME"); !folder.empty()) return folder + "/.cache/flashjit";
  return {};
}

DiskCache::DiskCache(const std::string& folder) : folder_(prepare_folder(folder)) {}

std::string DiskCache::path(const Key& key) const {
  return folder_ + "/" + store_name + "/" + entry_name(key);
}

std::optional<CacheEntry> DiskCache::lookup(const Key& key, std::string* why) const {
  tell(why, {});
  const File store = open_store(folder_, false, why);
  if (!store) return std::nullopt;
  const std::string name = entry_name(key);
  const File file = open_entry(store.get(), name);
  struct stat status;
  CacheEntry entry;
  std::string damage;
  if (file) {
    if (::fstat(file.get(), &status) != 0) return std::nullopt;
    bool unreadable = false;
    damage = read_entry(file.get(), status, true, entry, unreadable);
    if (unreadable) {
      tell(why, name + " cannot be read: " + damage);
      return std::nullopt;
    }
    if (damage.empty() && entry.key == key) return entry;
    if (damage.empty() && entry.key.digest() == key.digest()) {
      tell(why, name + " holds another key with the same digest");
      return std::nullopt;
    }
    if (damage.empty()) damage = "holds another key";
  } else {
    // A symbolic link (ELOOP) or a socket (ENXIO) in an entry's place; anything else is not the file's fault.
    const int error = errno;
    if (error == ENOENT) return std::nullopt;
    if ((error != ELOOP && error != ENXIO) ||
        ::fstatat(store.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) {
      tell(why, name + " cannot be opened: " + error_text(error));
      return std::nullopt;
    }
    damage = "not a regular file";
  }
  set_aside(store.get(), name, status);
  tell(why, name + " was set aside: " + damage);
  return std::nullopt;
}

KeyLock DiskCache::lock(const Key& key, std::chrono::milliseconds patience, std::string* why) const {
  using namespace std::chrono;
  KeyLock lock;
  const File store = open_store(folder_, true, why);
  if (!store) return lock;
  // Private, since whoever can open it could hold others up.
  File file(::openat(store.get(), "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file) {
    tell(why, "cannot lock: " + error_text(errno));
    return lock;
  }
  lock.offset_ = lock_offset(key);
  lock.process_ = ::getpid();
  // Asking again rather than sleeping in the kernel: that could not give up, and NFS clients ask at long
  // intervals. We notice the release at most a sixteenth of the time waited too late.
  for (const auto start = steady_clock::now(); !set_lock(file.get(), F_WRLCK, lock.offset_);) {
    const auto waited = duration_cast<microseconds>(steady_clock::now() - start);
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) {
      tell(why, "cannot lock: " + error_text(errno));
      return lock;
    }
    if (waited >= patience) {
      tell(why,
           "another process has been building it for " + std::to_string(patience.count()) + " ms and more");
      return lock;
    }
    std::this_thread::sleep_for(std::clamp<microseconds>(waited / 16, microseconds(200), milliseconds(20)));
  }
  lock.file_ = std::move(file);
  return lock;
}

bool DiskCache::publish(const CacheEntry& entry, std::string* why) const {
  std::string reason;
  const std::optional<std::string> bytes = encode_entry(entry, reason);
  const File store = bytes ? open_store(folder_, true, &reason) : File();
  const File temporaries = store ? open_folder(store.get(), "tmp", true, &reason) : File();
  if (temporaries) {
    Temporary::remove_stale(temporaries.get());
    Temporary file(temporaries.get());
    if (file && file.write(*bytes) && file.move_to(store.get(), entry_name(entry.key))) return true;
    reason = error_text(errno);
  }
  tell(why, "cannot store " + path(entry.key) + ": " + reason);
  return false;
}

std::vector<DiskCache::Listing> DiskCache::list(bool verify) const {
  std::vector<Listing> listings;
  const File store = open_store(folder_, false, nullptr);
  if (!store) return listings;
  for (const std::string& name : names_in(store.get())) {
    if (!is_entry_name(name)) continue;
    Listing listing;
    listing.path = folder_ + "/" + store_name + "/" + name;
    CacheEntry entry;
    struct stat status;
    if (::fstatat(store.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    const File file = open_entry(store.get(), name);
    if (!file && errno == ENOENT) continue;
    if (!file || ::fstat(file.get(), &status) != 0) {
      listing.damage = error_text(errno);
    } else {
      bool unreadable = false;
      listing.damage = read_entry(file.get(), status, verify, entry, unreadable);
    }
    listing.size = static_cast<std::uint64_t>(status.st_size);
    listing.modified = status.st_mtime;
    if (listing.damage.empty() && entry.key.digest() != name.substr(0, digest_size)) {
      listing.damage = "holds another key";
    }
    if (listing.damage.empty()) {
      entry.payload.clear();
      listing.entry = std::move(entry);
    }
    listings.push_back(std::move(listing));
  }
  std::sort(listings.begin(), listings.end(),
            [](const Listing& a, const Listing& b) { return a.path < b.path; });
  return listings;
}

std::size_t DiskCache::clear() const {
  std::size_t removed = 0;
  std::string failure;
  const File store = open_store(folder_, false, &failure);
  const auto remove = [&](int folder, const std::string& name) {
    if (::unlinkat(folder, name.c_str(), 0) == 0) {
      ++removed;
    } else if (errno != ENOENT) {
      failure = name + ": " + error_text(errno);
    }
  };
  if (store) {
    for (const std::string& name : names_in(store.get())) {
      if (is_entry_name(name)) remove(store.get(), name);
    }
    if (const File quarantine = open_folder(store.get(), "quarantine", false, &failure)) {
      for (const std::string& name : names_in(quarantine.get())) remove(quarantine.get(), name);
    }
    if (const File temporaries = open_folder(store.get(), "tmp", false, &failure)) {
      removed += Temporary::remove_stale(temporaries.get());
    }
  }
  if (!failure.empty()) {
    throw Error(ErrorCode::cache_failed, "clearing the cache folder " + folder_ + " removed " +
                                             std::to_string(removed) + " files, but not all: " + failure +
                                             "; run it as the folder's owner, where it can be written");
  }
  return removed;
}

}  // namespace flashjit
