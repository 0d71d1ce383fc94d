// Content-addressed entries in one folder, shared by any number of processes, threads and versions of
// flashjit.
//
//   FOLDER/v3/REQUEST-ENTRY.kernel   an entry (entry_format.hpp), named by the digests of its request and of
//                                    its key; appears by rename, whole or not at all
//   FOLDER/v3/lock                   a byte at an offset taken from ENTRY is locked while that key is being
//                                    built; holds no data, never removed
//   FOLDER/v3/tmp/, quarantine/      files being written, damaged files (folder.hpp)
//
// v3 is the format version: another version has a folder of its own and neither touches the other's. The
// names are the index that leads from a request to its entries where there is no compiler to make a key with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/entry_format.hpp"
#include "cache/eviction.hpp"
#include "cache/file.hpp"
#include "cache/folder.hpp"
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

// The lookup's caller judges a whole entry, and may move data out of it. Returns success, or why the caller
// cannot use it.
using EntryUse = std::function<Finding(CacheEntry& entry)>;

// To build a key once however many ask: lookup; lock; lookup again; build; publish; release. All but the
// build may fail, and then cost a build, no more.
class DiskCache {
 public:
  // FLASHJIT_CACHE_DIR, else $XDG_CACHE_HOME/flashjit, else $HOME/.cache/flashjit; empty if none of them is
  // set, and in set-user-id programs.
  static std::string default_folder();

  // FLASHJIT_CACHE_PATH: read-only folders, separated by colons; empty if it is not set, and in set-user-id
  // programs.
  static std::string default_layers();

  enum class Access {
    read_write,  // creates the folder (0700) if it is missing
    read_only,   // never creates, moves, touches or removes anything in it
  };
  // FLASHJIT_CACHE_MAX_BYTES, else 1 GiB. Throws cache_failed where that is not a number above 0.
  static std::uint64_t default_max_bytes();

  // Throws cache_failed where the folder is missing or cannot be made, or where others could write to it
  // (ownership, mode, or a symbolic link to such a place), with the reason and what would work.
  // max_bytes: of all entries; 0: the default. It may be exceeded by a sixteenth for every process that
  // publishes.
  explicit DiskCache(const std::string& folder, Access access = Access::read_write,
                     std::uint64_t max_bytes = 0);

  Access access() const { return access_; }
  // Absolute, free of symbolic links.
  const std::string& folder() const { return folder_; }
  // Where that key's entry is or would be.
  std::string path(const Key& key) const;

  // The entry if a whole one with exactly these key fields is there. A partial, corrupt or foreign file is
  // set aside and counts as missing, as does one that `use` finds damaged; one that it only cannot use stays.
  // *why: empty on a plain miss, else why a file that is there was not used.
  std::optional<CacheEntry> lookup(const Key& key, std::string* why = nullptr,
                                   const EntryUse& use = {}) const;

  // An entry for that request (kernel_key.hpp), whatever compiler made it: the newest whole one that `use`
  // takes.
  std::optional<CacheEntry> lookup_request(const Key& request, std::string* why = nullptr,
                                           const EntryUse& use = {}) const;

  // Waits for every other holder of the key, but not longer than `patience`, so that a stopped process stops
  // nobody else. Not held, with the reason in *why, where patience ran out or the folder cannot hold locks
  // (read-only, no locks on its file system): build without it, publish() is safe all the same.
  KeyLock lock(const Key& key, std::chrono::milliseconds patience = std::chrono::minutes(1),
               std::string* why = nullptr) const;

  // Written privately, flushed, renamed; then the entries used least recently make room if the cap is
  // reached. False with the reason in *why where it could not be (disk full, read-only): the caller goes on
  // without, and nothing is left behind.
  bool publish(const CacheEntry& entry, std::string* why = nullptr) const;

  struct Listing {
    std::string path;
    std::uint64_t size = 0;
    std::int64_t used = 0;            // last, in seconds since the epoch; a minute may be missing
    std::optional<CacheEntry> entry;  // without payload; absent when damaged
    std::string damage;               // why, when absent
  };
  // In order of path. verify: read and check payloads too. Moves nothing.
  std::vector<Listing> list(bool verify) const;
  // Enforces a cap now: removes the entries used least recently (eviction.hpp), but none that is being built
  // or waited for, and what dead processes left unfinished.
  Eviction gc(std::uint64_t max_bytes) const;
  // Removes every entry, everything set aside and what dead processes left unfinished; returns how many
  // files. Leaves files alone that are not the cache's. Throws cache_failed if some could not be removed.
  std::size_t clear() const;

 private:
  std::optional<CacheEntry> read(int store, const std::string& name,
                                 const std::function<Finding(const CacheEntry&)>& check, std::string* why,
                                 const EntryUse& use) const;

  std::string folder_;
  Access access_;
  std::uint64_t max_bytes_ = 0;
  // What may still be published before somebody has to look at the size of it all; of all copies of this.
  std::shared_ptr<std::atomic<std::int64_t>> room_;
};

}  // namespace flashjit
