// Content-addressed entries in one folder, shared by any number of processes, threads and versions of
// flashjit.
//
//   FOLDER/v1/DIGEST.kernel   an entry (entry_format.hpp); appears by rename, whole or not at all
//   FOLDER/v1/lock            byte DIGEST / 2^65 is locked while that key is being built; holds no data,
//   never removed FOLDER/v1/tmp/            entries being written FOLDER/v1/quarantine/     damaged files,
//   kept for inspection: the newest 16
//
// v1 is the format version: another version has a folder of its own and neither touches the other's.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cache/entry_format.hpp"
#include "cache/file.hpp"
#include "cache/key.hpp"

namespace flashjit {

// Exclusive hold on one key across threads and processes. Released by destruction and by the end of the
// process, however it ends. A child made by fork() does not release its parent's lock, but keeps it if the
// parent dies before it.
class KeyLock {
 public:
  KeyLock() = default;
  KeyLock(KeyLock&&) noexcept = default;
  KeyLock& operator=(KeyLock&& other) noexcept;
  ~KeyLock();
  bool held() const { return static_cast<bool>(file_); }

 private:
  friend class DiskCache;
  File file_;
  std::int64_t offset_ = 0;
  int process_ = 0;
};

// To build a key once however many ask: lookup; lock; lookup again; build; publish; release. All but the
// build may fail, and then cost a build, no more.
class DiskCache {
 public:
  // FLASHJIT_CACHE_DIR, else $XDG_CACHE_HOME/flashjit, else $HOME/.cache/flashjit; empty if none of them is
  // set, and in set-user-id programs.
  static std::string default_folder();

  // Creates the folder (0700) if it is missing. Throws cache_failed where it cannot be made, or where others
  // could write to it (ownership, mode, or a symbolic link to such a place), with the reason and what would
  // work.
  explicit DiskCache(const std::string& folder);

  // Absolute, free of symbolic links.
  const std::string& folder() const { return folder_; }
  // Where that key's entry is or would be.
  std::string path(const Key& key) const;

  // The entry if a whole one with exactly these key fields is there. A partial, corrupt or foreign file is
  // set aside and counts as missing. *why: empty on a plain miss, else why a file that is there was not used.
  std::optional<CacheEntry> lookup(const Key& key, std::string* why = nullptr) const;

  // Waits for every other holder of the key, but not longer than `patience`, so that a stopped process stops
  // nobody else. Not held, with the reason in *why, where patience ran out or the folder cannot hold locks
  // (read-only, no locks on its file system): build without it, publish() is safe all the same.
  KeyLock lock(const Key& key, std::chrono::milliseconds patience = std::chrono::minutes(1),
               std::string* why = nullptr) const;

  // Written privately, flushed, renamed. False with the reason in *why where it could not be (disk full,
  // read-only): the caller goes on without, and nothing is left behind.
  bool publish(const CacheEntry& entry, std::string* why = nullptr) const;

  struct Listing {
    std::string path;
    std::uint64_t size = 0;
    std::int64_t modified = 0;        // seconds since the epoch
    std::optional<CacheEntry> entry;  // without payload; absent when damaged
    std::string damage;               // why, when absent
  };
  // In order of path. verify: read and check payloads too. Moves nothing.
  std::vector<Listing> list(bool verify) const;
  // Removes every entry, everything set aside and what dead processes left unfinished; returns how many
  // files. Leaves files alone that are not the cache's. Throws cache_failed if some could not be removed.
  std::size_t clear() const;

 private:
  std::string folder_;
};

}  // namespace flashjit
