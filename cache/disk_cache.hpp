// Content-addressed entries in one folder, shared by any number of processes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/key.hpp"

namespace flashjit {

struct CacheEntry {
  Key key;
  std::string metadata;  // JSON text, for people and for `cache ls`
  std::string payload;   // machine code
};

// Exclusive hold on one key across threads and processes; dies with its holder. Movable, released by destruction.
class KeyLock {
 public:
  KeyLock() = default;
  KeyLock(KeyLock&&) noexcept;
  KeyLock& operator=(KeyLock&&) noexcept;
  ~KeyLock();

 private:
  friend class DiskCache;
  int fd_ = -1;
};

class DiskCache {
 public:
  // FLASHJIT_CACHE_DIR, else $XDG_CACHE_HOME/flashjit, else ~/.cache/flashjit; empty if there is no home.
  static std::string default_folder();

  // Creates the folder (0700) if it is missing. Throws cache_failed where it cannot be made, or where others could write
  // to it (ownership, mode, or a symbolic link to such a place), with the reason and what would work.
  explicit DiskCache(std::string folder);

  const std::string& folder() const { return folder_; }
  // Where that key's entry is or would be.
  std::string path(const Key& key) const;

  // The entry if a whole one with exactly these key fields is there. A partial, corrupt or foreign file is set aside
  // (renamed, kept for inspection) and counts as missing.
  std::optional<CacheEntry> lookup(const Key& key) const;
  // Waits for every other holder of the key. Throws cache_failed if the folder cannot hold locks.
  KeyLock lock(const Key& key) const;
  // Written privately, flushed, renamed. False with the reason in *why where it could not be (disk full, read-only): the
  // caller goes on without.
  bool publish(const CacheEntry& entry, std::string* why = nullptr) const;

  struct Listing {
    std::string path;
    std::uint64_t size = 0;
    std::int64_t modified = 0;          // seconds since the epoch
    std::optional<CacheEntry> entry;    // without payload; absent when damaged
    std::string damage;                 // why, when absent
  };
  // verify: read and check payloads too.
  std::vector<Listing> list(bool verify) const;
  // Removes every entry and everything set aside; returns how many files. Leaves foreign files alone.
  std::size_t clear() const;

 private:
  std::string folder_;
};

// The fields in which two keys differ, one line each: "compiler: nvrtc 13.0 ... | nvrtc 12.9 ...".
std::string explain_difference(const Key& a, const Key& b);

}  // namespace flashjit
