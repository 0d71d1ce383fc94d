#include "tools/serve/object_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cache/disk_cache.hpp"
#include "cache/entry_format.hpp"
#include "cache/folder.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"

namespace flashjit::serve {
namespace {

constexpr std::uint64_t most_record_bytes = 4 << 20;
constexpr auto look_pause = std::chrono::seconds(1);
// A full folder spares the files that were used within the last minute.
constexpr auto mark_pause = std::chrono::seconds(20);
constexpr std::size_t entry_name_size = 2 * digest_size + 1;  // without its ending

// The folder of entries within a cache folder: "v3".
const std::string& entries() {
  static const std::string name = DiskCache::name("", "").substr(0, DiskCache::name("", "").find('/'));
  return name;
}

// "tune/DEVICE/DIGEST.json", of plain words.
bool is_record_name(const std::string& name) {
  constexpr const char* plain = "abcdefghijklmnopqrstuvwxyz0123456789_-";
  const std::size_t slash = name.find('/', 5);
  return name.starts_with("tune/") && slash != std::string::npos && slash > 5 && name.ends_with(".json") &&
         name.find_first_not_of(plain, 5) == slash &&
         name.find_first_not_of(plain, slash + 1) == name.size() - 5;
}

}  // namespace

ObjectCache::ObjectCache(std::string folder, Verifier verifier, Signer signer, std::size_t most_bytes)
    : folder_(std::move(folder)),
      verifier_(std::move(verifier)),
      signer_(std::move(signer)),
      most_bytes_(most_bytes) {}

Bytes ObjectCache::get(const std::string& name) {
  if (const auto found = objects_.find(name); found != objects_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    if (const auto now = std::chrono::steady_clock::now(); now - found->second.marked > mark_pause) {
      found->second.marked = now;
      mark_used(name);
    }
    return found->second.bytes;
  }
  return DiskCache::is_name(name) || is_record_name(name) ? read(name) : nullptr;
}

Bytes ObjectCache::read(const std::string& name) {
  File folder = open_cache_folder(folder_, false, nullptr);
  std::size_t begin = 0;
  for (std::size_t slash; folder && (slash = name.find('/', begin)) != std::string::npos; begin = slash + 1)
    folder = open_folder(folder.get(), name.substr(begin, slash - begin), false, nullptr);
  if (!folder) return nullptr;
  const bool is_entry = DiskCache::is_name(name);
  std::string bytes;
  const auto whole = [&](int file, const struct stat& status) -> Finding {
    const auto size = static_cast<std::uint64_t>(status.st_size);
    if (size > (is_entry ? std::uint64_t{280} << 20 : most_record_bytes)) return {"is too large"};
    bytes.resize(size);
    if (!read_fully(file, bytes.data(), bytes.size())) return {"ends early"};
    if (CacheEntry entry; is_entry) {
      if (std::string damage = decode_entry(bytes, entry); !damage.empty()) return {damage};
      if (DiskCache::name(entry.key) != name) return {"holds another key"};
      const timespec times[] = {{0, UTIME_NOW}, {0, UTIME_NOW}};  // used now: the last to be removed
      ::futimens(file, times);
    }
    return {};
  };
  const std::optional<Finding> finding = inspect_file(folder.get(), name.substr(begin), whole);
  if (!finding || !finding->reason.empty()) return nullptr;
  return keep(name, std::move(bytes));
}

Bytes ObjectCache::keep(const std::string& name, std::string bytes) {
  try {
    std::string why;
    if (split_signature(bytes).line.empty()
            ? !signer_ || !fit_for_signed(name, bytes, verifier_, signer_, &why)
            : !why_not_signed(name, bytes, verifier_).empty())
      return nullptr;
  } catch (const Error&) {  // no key to sign with
    return nullptr;
  }
  auto kept = std::make_shared<const std::string>(std::move(bytes));
  if (name.starts_with("tune/")) return kept;  // may change at any time
  uses_.push_front(name);
  objects_[name] = {kept, uses_.begin(), std::chrono::steady_clock::now()};
  bytes_ += kept->size();
  while (bytes_ > most_bytes_ && objects_.size() > 1) {
    const auto last = objects_.find(uses_.back());
    bytes_ -= last->second.bytes->size();
    objects_.erase(last);
    uses_.pop_back();
  }
  return kept;
}

// Otherwise the folder, when it is full, would first remove the objects that are always given from memory.
void ObjectCache::mark_used(const std::string& name) const {
  const std::size_t slash = name.find('/');
  const File folder = open_cache_folder(folder_, false, nullptr);
  const File store = folder ? open_folder(folder.get(), name.substr(0, slash), false, nullptr) : File();
  const timespec times[] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
  if (store) ::utimensat(store.get(), name.c_str() + slash + 1, times, AT_SYMLINK_NOFOLLOW);
}

void ObjectCache::add(const std::string& name, std::string bytes) {
  const std::string digests = name.substr(name.find('/') + 1, entry_name_size);
  newest_[digests.substr(0, digest_size)] = digests.substr(digest_size + 1);
  if (!objects_.contains(name)) keep(name, std::move(bytes));
}

std::string ObjectCache::newest(const std::string& request_digest) {
  const auto known = [&] {
    const auto found = newest_.find(request_digest);
    return found == newest_.end() ? std::string() : found->second;
  };
  if (std::string entry = known(); !entry.empty()) return entry;
  look_again();
  return known();
}

// Others publish into the folder, too.
void ObjectCache::look_again() {
  const auto now = std::chrono::steady_clock::now();
  if (now - looked_ < look_pause && looked_ != std::chrono::steady_clock::time_point()) return;
  looked_ = now;
  const File folder = open_cache_folder(folder_, false, nullptr);
  const File store = folder ? open_folder(folder.get(), entries(), false, nullptr) : File();
  struct stat status;
  if (!store || ::fstat(store.get(), &status) != 0) return;
  if (status.st_mtim.tv_sec == listed_.tv_sec && status.st_mtim.tv_nsec == listed_.tv_nsec) return;
  listed_ = status.st_mtim;
  std::map<std::string, std::pair<std::int64_t, std::string>> found;  // with the time of writing
  for_each_name(store.get(), [&](std::string_view item) {
    if (!DiskCache::is_name(entries() + "/" + std::string(item))) return;
    const std::string name(item);
    struct stat file;
    if (::fstatat(store.get(), name.c_str(), &file, AT_SYMLINK_NOFOLLOW) != 0) return;
    auto& best = found[name.substr(0, digest_size)];
    best = std::max(best, {file.st_mtime, name.substr(digest_size + 1, digest_size)});
  });
  newest_.clear();
  for (auto& [request, best] : found) newest_[request] = std::move(best.second);
}

}  // namespace flashjit::serve
