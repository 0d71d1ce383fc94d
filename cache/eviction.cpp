#include "cache/eviction.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <ctime>

namespace flashjit {
namespace {

constexpr std::int64_t moment = 60;  // seconds

struct StoredFile {
  std::string name;
  std::uint64_t size;
  timespec used;
};

bool earlier(const StoredFile& a, const StoredFile& b) {
  if (a.used.tv_sec != b.used.tv_sec) return a.used.tv_sec < b.used.tv_sec;
  return a.used.tv_nsec < b.used.tv_nsec;
}

}  // namespace

void mark_used(int file, std::int64_t modified) {
  const std::int64_t age = ::time(nullptr) - modified;
  if (age >= 0 && age < moment) return;
  const timespec times[] = {{0, UTIME_OMIT}, {0, UTIME_NOW}};
  ::futimens(file, times);
}

Eviction evict(int folder, const std::vector<std::string>& names, std::uint64_t max_bytes,
               const std::function<bool(const std::string& name)>& in_use) {
  const std::int64_t now = ::time(nullptr);
  Eviction result;
  std::vector<StoredFile> files;
  for (const std::string& name : names) {
    struct stat status;
    if (::fstatat(folder, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    StoredFile file{name, static_cast<std::uint64_t>(status.st_size), status.st_mtim};
    if (file.used.tv_sec > now + moment) {
      // The file counts as used a moment ago, and no more recently: other files may have to stay as well.
      file.used = {now - moment, 0};
      const timespec times[] = {{0, UTIME_OMIT}, file.used};
      ::utimensat(folder, name.c_str(), times, AT_SYMLINK_NOFOLLOW);
    }
    result.left_bytes += file.size;
    files.push_back(std::move(file));
  }
  if (result.left_bytes <= max_bytes) return result;
  std::sort(files.begin(), files.end(), earlier);
  const std::uint64_t enough = max_bytes - max_bytes / 10;
  for (const StoredFile& file : files) {
    if (result.left_bytes <= enough) break;
    if (file.used.tv_sec > now - moment || in_use(file.name)) {
      ++result.spared;
      continue;
    }
    if (::unlinkat(folder, file.name.c_str(), 0) != 0) continue;
    ++result.removed;
    result.removed_bytes += file.size;
    result.left_bytes -= file.size;
  }
  return result;
}

}  // namespace flashjit
