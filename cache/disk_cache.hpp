// Content-addressed entries in one folder, shared by any number of processes, threads and versions of
// flashjit.
//
//   FOLDER/v3/REQUEST-ENTRY.kernel   an entry (entry_format.hpp), named by the digests of its request
//                                    and of its key; appears by rename, whole or not at all
//   FOLDER/v3/lock                   holds no data and is never removed; a byte at an offset taken
//                                    from ENTRY is locked while that key is being built
//   FOLDER/v3/tmp/, quarantine/      files being written, damaged files (folder.hpp)
//   FOLDER/signed                    if it is there, whatever it holds, the folder asks for signatures:
//                                    entries and records without one of a trusted key are not used
//
// v3 is the format version. Each version has a folder of its own and never touches another's. The file
// names are an index from requests to entries: without a compiler, no entry's key can be computed.
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
#include "cache/folder.hpp"
#include "cache/fork.hpp"
#include "cache/key.hpp"
#include "cache/signature.hpp"

namespace flashjit {

// Exclusive hold on one key across threads and processes. Destruction releases
// it, and so does the end of the process, however it ends. A child made by fork()
// neither releases its parent's lock nor keeps it.
class KeyLock {
 public:
  KeyLock() = default;
  KeyLock(KeyLock&&) noexcept = default;
  KeyLock& operator=(KeyLock&& other) noexcept;
  ~KeyLock();
  bool held() const { return static_cast<bool>(file_); }

 private:
  friend class DiskCache;
  HeldFile file_;
  std::int64_t offset_ = 0;
};

// Called by a lookup with an undamaged entry, whose data it may move
// out. Returns success, or why the caller cannot use the entry.
using EntryUse = std::function<Finding(CacheEntry& entry)>;

// To build a key only once, however many callers ask: lookup; lock; lookup again; build;
// publish; release. If any step except the build fails, the only cost is another build.
class DiskCache {
 public:
  // FLASHJIT_CACHE_DIR, else $XDG_CACHE_HOME/flashjit, else $HOME/.cache/flashjit.
  // Empty if none of them is set, and in set-user-id programs.
  static std::string default_folder();

  // FLASHJIT_CACHE_PATH: read-only folders, separated by colons.
  // Empty if it is not set, and in set-user-id programs.
  static std::string default_layers();

  enum class Access {
    read_write,  // creates the folder (0700) if it is missing
    read_only,   // never creates, moves, touches or removes anything in it
    inspect,     // as read_only; a folder that is missing is empty
  };
  // FLASHJIT_CACHE_MAX_BYTES, else 1 GiB. Throws cache_failed if the variable is not a number above 0.
  static std::uint64_t default_max_bytes();

  // `max_bytes` is the limit on all entries together; 0 means the default. Each publishing process may exceed
  // it by a sixteenth. Throws cache_failed, with the reason and what would work, if the folder is missing,
  // cannot be made, or could be written by others (owner, mode, or a symbolic link to such a place).
  explicit DiskCache(const std::string& folder, Access access = Access::read_write,
                     std::uint64_t max_bytes = 0);

  // How the signatures of a folder that asks for them are checked, and made for what is published unsigned.
  // Such a folder gives nothing without the first and takes nothing unsigned without the second.
  void use_signatures(Verifier verifier, Signer signer) {
    verifier_ = std::move(verifier);
    signer_ = std::move(signer);
  }
  const Verifier& verifier() const { return verifier_; }
  const Signer& signer() const { return signer_; }

  Access access() const { return access_; }
  // Absolute, free of symbolic links.
  const std::string& folder() const { return folder_; }
  // The path where the key's entry is or would be.
  std::string path(const CacheKey& key) const;
  // The same within any cache folder: "v3/REQUEST-ENTRY.kernel".
  static std::string name(const CacheKey& key);
  // "v3/REQUEST", and the entry's name by the digests of both keys.
  static std::string request_name(const CacheKey& request);
  static std::string name(const std::string& request_digest, const std::string& entry_digest);
  // Whether the text is such a name of an entry.
  static bool is_name(std::string_view text);

  // The entry with exactly these key fields, if an undamaged one is there. A partial,
  // corrupt or foreign file is set aside and counts as missing, and so does an entry
  // that `use` finds damaged. An entry that `use` merely cannot use stays. *why is
  // empty on a plain miss; otherwise it says why an existing file was not used.
  std::optional<CacheEntry> lookup(const CacheKey& key, std::string* why = nullptr,
                                   const EntryUse& use = {}) const;

  // The newest undamaged entry for the request (kernel_key.hpp)
  // that `use` accepts, whichever compiler made it.
  std::optional<CacheEntry> lookup_request(const CacheKey& request, std::string* why = nullptr,
                                           const EntryUse& use = {}) const;

  // Waits for every other holder of the key, but not longer than `patience`, so that a
  // stopped process stops no others. If patience runs out, or the folder cannot hold
  // locks (read-only, a file system without locks), the lock is not held and *why has the
  // reason. The caller may still build and publish: publish() is safe without the lock. `gives_up`, asked
  // every 20 ms or more often, ends the wait, too.
  KeyLock lock(const CacheKey& key, std::chrono::milliseconds patience = std::chrono::minutes(1),
               std::string* why = nullptr, const std::function<bool()>& gives_up = {}) const;

  // Writes the entry to a private file, flushes and renames it. If the limit is reached, the least
  // recently used entries are removed. If the entry cannot be written (disk full, read-only),
  // returns false with the reason in *why and leaves nothing behind; the caller goes on without.
  bool publish(const CacheEntry& entry, std::string* why = nullptr) const;
  // The same of an entry's bytes, which decode_entry() has accepted.
  bool publish_bytes(const CacheKey& key, std::string bytes, Flush flush, std::string* why = nullptr) const;

  struct Listing {
    std::string path;
    std::uint64_t size = 0;
    std::int64_t used = 0;            // last use, in seconds since the epoch, exact to a minute
    std::optional<CacheEntry> entry;  // without payload; absent if damaged
    std::string damage;               // why the entry is absent
  };
  // Lists the entries in order of path. `verify`: payloads are read and checked, too, and signatures where
  // they are asked for. Moves nothing.
  std::vector<Listing> list(bool verify) const;
  // Enforces the limit now: removes the least recently used entries (eviction.hpp), except
  // those that are being built or waited for, and the unfinished files of dead processes.
  Eviction gc(std::uint64_t max_bytes) const;
  // Removes every entry, every file set aside and the unfinished files of dead processes; leaves other
  // files alone. Returns the number of removed files. Throws cache_failed if some could not be removed.
  std::size_t clear() const;

 private:
  std::optional<CacheEntry> read(int store, const std::string& name,
                                 const std::function<Finding(const CacheEntry&)>& check, std::string* why,
                                 const EntryUse& use) const;

  std::string folder_;
  Access access_;
  std::uint64_t max_bytes_ = 0;
  Verifier verifier_;
  Signer signer_;
  // Bytes that may still be published before the size of all
  // entries must be looked at; shared by all copies of this cache.
  std::shared_ptr<std::atomic<std::int64_t>> room_;
};

}  // namespace flashjit
