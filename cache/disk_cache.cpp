#include "cache/disk_cache.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <algorithm>
#include <charconv>
#include <string_view>
#include <thread>

#include "cache/environment.hpp"
#include "cache/folder.hpp"
#include "cache/kernel_key.hpp"
#include "cache/trust.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

const std::string store_name = "v" + std::to_string(entry_format_version);
constexpr std::string_view entry_suffix = ".kernel";

// The position of the entry's digest in a file name, after the request's digest.
constexpr std::size_t entry_digest_at = digest_size + 1;

std::string entry_name(const CacheKey& key) {
  return request_of(key).digest() + "-" + key.digest() + std::string(entry_suffix);
}

bool is_entry_name(std::string_view name) {
  const auto is_digest = [&](std::size_t begin) {
    return name.substr(begin, digest_size).find_first_not_of("0123456789abcdef") == std::string_view::npos;
  };
  return name.size() == entry_digest_at + digest_size + entry_suffix.size() && is_digest(0) &&
         name[digest_size] == '-' && is_digest(entry_digest_at) && name.ends_with(entry_suffix);
}

// Opens the folder of the entries, FOLDER/v3.
File open_store(const std::string& folder_path, bool create, std::string* why) {
  const File folder = open_cache_folder(folder_path, create, why);
  return folder ? open_folder(folder.get(), store_name, create, why) : File();
}

// Reads and checks one entry.
Finding read_entry(int file, const struct stat& status, bool with_payload, CacheEntry& entry) {
  int error = 0;
  const auto source = [&](char* to, std::size_t size) {
    const bool complete = read_fully(file, to, size);
    if (!complete) error = errno;
    return complete;
  };
  std::string damage = decode_entry(static_cast<std::uint64_t>(status.st_size), source, with_payload, entry);
  if (error != 0) return {error_text(error), false};
  return {damage, !damage.empty()};
}

// The lock's offset: 63 bits of the digest. Two keys with the same
// offset would only wait for each other; one in 10^18 pairs has it.
std::int64_t lock_offset(const std::string& digest) {
  return static_cast<std::int64_t>(std::stoull(digest.substr(0, 16), nullptr, 16) >> 1);
}

// Open file description locks exclude threads as well as processes. Unlike POSIX
// record locks, they survive when another part of the process closes the same file.
struct flock byte_range(short type, std::int64_t offset) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = offset;
  range.l_len = 1;
  return range;
}
bool set_lock(int file, short type, std::int64_t offset) {
  struct flock range = byte_range(type, offset);
  return ::fcntl(file, F_OFD_SETLK, &range) == 0;
}
// Whether another open file holds the lock.
bool is_locked(int file, std::int64_t offset) {
  struct flock range = byte_range(F_WRLCK, offset);
  return ::fcntl(file, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

}  // namespace

KeyLock& KeyLock::operator=(KeyLock&& other) noexcept {
  std::swap(file_, other.file_);
  std::swap(offset_, other.offset_);
  return *this;
}

KeyLock::~KeyLock() {
  // Unlocks explicitly: a child that a host made without fork()'s handlers may share the lock.
  if (file_.is_ours()) set_lock(file_.get(), F_UNLCK, offset_);
}

std::string DiskCache::default_folder() {
  if (std::string folder = environment_variable(Variable::cache_dir); !folder.empty()) return folder;
  // The XDG base directory specification says to ignore relative paths.
  if (const std::string folder = environment_variable(Variable::xdg_cache_home); folder.starts_with('/'))
    return folder + "/flashjit";
  if (const std::string folder = environment_variable(Variable::home); !folder.empty())
    return folder + "/.cache/flashjit";
  return {};
}

std::string DiskCache::default_layers() {
  return environment_variable(Variable::cache_path);
}

std::uint64_t DiskCache::default_max_bytes() {
  const std::string text = environment_variable(Variable::cache_max_bytes);
  if (text.empty()) return std::uint64_t{1} << 30;
  std::uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  if (error != std::errc() || *end != 0 || bytes == 0) {
    throw Error(ErrorCode::cache_failed, "FLASHJIT_CACHE_MAX_BYTES is " + in_quotes(text) +
                                             ", which is not a number of bytes; 1073741824 would work");
  }
  return bytes;
}

DiskCache::DiskCache(const std::string& folder, Access access, std::uint64_t max_bytes)
    : folder_(prepare_folder(folder, access == Access::read_write  ? Missing::make
                                     : access == Access::read_only ? Missing::refuse
                                                                   : Missing::leave)),
      access_(access),
      room_(std::make_shared<std::atomic<std::int64_t>>(0)) {
  if (access == Access::read_write) max_bytes_ = max_bytes ? max_bytes : default_max_bytes();
}

std::string DiskCache::path(const CacheKey& key) const {
  return folder_ + "/" + name(key);
}

std::string DiskCache::name(const CacheKey& key) {
  return store_name + "/" + entry_name(key);
}

std::string DiskCache::name(const std::string& request_digest, const std::string& entry_digest) {
  return store_name + "/" + request_digest + "-" + entry_digest + std::string(entry_suffix);
}

std::string DiskCache::request_name(const CacheKey& request) {
  return store_name + "/" + request.digest();
}

bool DiskCache::is_name(std::string_view text) {
  return text.starts_with(store_name + "/") && is_entry_name(text.substr(store_name.size() + 1));
}

std::optional<CacheEntry> DiskCache::read(int store, const std::string& name,
                                          const std::function<Finding(const CacheEntry&)>& check,
                                          std::string* why, const EntryUse& use) const {
  CacheEntry entry;
  const auto whole = [&](int file, const struct stat& status) {
    Finding finding = read_entry(file, status, true, entry);
    if (finding.reason.empty()) finding = check(entry);
    if (finding.reason.empty() && asks_for_signatures(store, ".."))
      finding.reason =
          why_not_signed(store_name + "/" + name, *encode_entry(entry, finding.reason), verifier_);
    if (finding.reason.empty() && use) finding = use(entry);
    if (finding.reason.empty() && access_ == Access::read_write) mark_used(file, status.st_mtime);
    return finding;
  };
  if (!read_file(store, name, access_ == Access::read_write, whole, why)) return std::nullopt;
  return entry;
}

std::optional<CacheEntry> DiskCache::lookup(const CacheKey& key, std::string* why,
                                            const EntryUse& use) const {
  tell(why, {});
  const File store = open_store(folder_, false, why);
  if (!store) return std::nullopt;
  const auto check = [&](const CacheEntry& entry) -> Finding {
    if (entry.key == key) return {};
    if (entry.key.digest() == key.digest()) return {"it holds another key with the same digest", false};
    return {"holds another key", true};
  };
  return read(store.get(), entry_name(key), check, why, use);
}

std::optional<CacheEntry> DiskCache::lookup_request(const CacheKey& request, std::string* why,
                                                    const EntryUse& use) const {
  tell(why, {});
  const File store = open_store(folder_, false, why);
  if (!store) return std::nullopt;
  const std::string wanted = request.digest() + "-";
  std::vector<std::pair<std::int64_t, std::string>> found;  // with the time of writing
  for_each_name(store.get(), [&](std::string_view item) {
    if (!item.starts_with(wanted) || !is_entry_name(item)) return;
    std::string name(item);
    struct stat status;
    if (::fstatat(store.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0)
      found.emplace_back(status.st_mtime, std::move(name));
  });
  std::sort(found.rbegin(), found.rend());
  std::string damage;  // of the first entry that was not used, reported even if a later one is used
  for (const auto& [time, name] : found) {
    const auto check = [&](const CacheEntry& entry) -> Finding {
      if (request_of(entry.key) == request && entry_name(entry.key) == name) return {};
      return {"holds another key", true};
    };
    std::string reason;
    std::optional<CacheEntry> entry = read(store.get(), name, check, &reason, use);
    if (damage.empty()) damage = std::move(reason);
    if (!entry) continue;
    tell(why, std::move(damage));
    return entry;
  }
  tell(why, std::move(damage));
  return std::nullopt;
}

KeyLock DiskCache::lock(const CacheKey& key, std::chrono::milliseconds patience, std::string* why,
                        const std::function<bool()>& gives_up) const {
  using namespace std::chrono;
  KeyLock lock;
  const File store = open_store(folder_, true, why);
  if (!store) return lock;
  // Private: a process that can open the file could make others wait.
  HeldFile file(
      [&] { return ::openat(store.get(), "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600); });
  if (!file) {
    tell(why, "cannot lock: " + error_text(errno));
    return lock;
  }
  lock.offset_ = lock_offset(key.digest());
  // Polls instead of blocking: a blocked wait cannot give up, and NFS clients ask only at long
  // intervals. Polling notices the release late by at most a sixteenth of the time waited.
  for (const auto start = steady_clock::now(); !set_lock(file.get(), F_WRLCK, lock.offset_);) {
    const auto waited = duration_cast<microseconds>(steady_clock::now() - start);
    if (errno != EAGAIN && errno != EACCES && errno != EINTR) {
      tell(why, "cannot lock: " + error_text(errno));
      return lock;
    }
    if (gives_up && gives_up()) {
      tell(why, "the wait for another process that builds it was ended");
      return lock;
    }
    if (waited >= patience) {
      tell(why,
           "another process has been building it for more than " + std::to_string(patience.count()) + " ms");
      return lock;
    }
    std::this_thread::sleep_for(std::clamp<microseconds>(waited / 16, microseconds(200), milliseconds(20)));
  }
  lock.file_ = std::move(file);
  return lock;
}

bool DiskCache::publish(const CacheEntry& entry, std::string* why) const {
  std::string reason;
  std::optional<std::string> bytes = encode_entry(entry, reason);
  if (bytes) return publish_bytes(entry.key, std::move(*bytes), Flush::yes, why);
  tell(why, "cannot store " + path(entry.key) + ": " + reason);
  return false;
}

bool DiskCache::publish_bytes(const CacheKey& key, std::string bytes, Flush flush, std::string* why) const {
  std::string reason;
  const File store = open_store(folder_, true, &reason);
  if (store &&
      (!asks_for_signatures(store.get(), "..") ||
       fit_for_signed(name(key), bytes, verifier_, signer_, &reason)) &&
      publish_file(store.get(), entry_name(key), bytes, &reason, flush)) {
    const auto size = static_cast<std::int64_t>(bytes.size());
    if (room_->fetch_sub(size) < size) {
      const std::uint64_t left = gc(max_bytes_).left_bytes;
      // Other processes publish, too, so the folder's size is looked at again before all of the room is used.
      *room_ =
          static_cast<std::int64_t>(left < max_bytes_ ? std::min(max_bytes_ - left, max_bytes_ / 16) : 0);
    }
    return true;
  }
  tell(why, "cannot store " + path(key) + ": " + reason);
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
    const auto read = [&](int file, const struct stat& opened) {
      status = opened;
      return read_entry(file, opened, verify, entry);
    };
    const std::optional<Finding> finding = inspect_file(store.get(), name, read);
    if (!finding) continue;
    listing.damage = finding->reason;
    listing.size = static_cast<std::uint64_t>(status.st_size);
    listing.used = status.st_mtime;
    if (listing.damage.empty() && entry_name(entry.key) != name) {
      listing.damage = "holds another key";
    }
    if (std::string unused; listing.damage.empty() && verify && asks_for_signatures(store.get(), ".."))
      listing.damage = why_not_signed(DiskCache::name(entry.key), *encode_entry(entry, unused), verifier_);
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

Eviction DiskCache::gc(std::uint64_t max_bytes) const {
  const File store = open_store(folder_, false, nullptr);
  if (!store) return {};
  remove_unfinished(store.get(), nullptr);
  std::vector<std::string> entries = names_in(store.get());
  std::erase_if(entries, [](const std::string& name) { return !is_entry_name(name); });
  const File locks(::openat(store.get(), "lock", O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  return evict(store.get(), entries, max_bytes, [&](const std::string& name) {
    return locks && is_locked(locks.get(), lock_offset(name.substr(entry_digest_at, digest_size)));
  });
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
    removed += remove_unfinished(store.get(), &failure);
  }
  if (!failure.empty()) {
    throw Error(ErrorCode::cache_failed, "clearing the cache folder " + folder_ + " removed " +
                                             std::to_string(removed) + " files, but not all: " + failure +
                                             "; run it as the folder's owner, where it can be written");
  }
  return removed;
}

}  // namespace flashjit
