// Tune records on disk.
//
//   FOLDER/tune/DEVICE/DIGEST.json   a record: to_json() of it, and perhaps a signature's line
//
// DEVICE is the device's name in lower case with dashes; DIGEST is the digest
// of the key. Files are published and set aside like entries (folder.hpp).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/key.hpp"
#include "cache/signature.hpp"
#include "cache/tune_record.hpp"

namespace flashjit {

inline constexpr int tune_format_version = 1;

// The cache key of a record: its digest names the record's file,
// and it is locked while a process tunes (DiskCache::lock).
CacheKey cache_key(const TuneKey& key);

// Reads a record from untrusted bytes. Returns nothing, with the reason in
// `why`, unless they are exactly the text that to_json() writes for some record.
std::optional<TuneRecord> parse_tune_record(std::string_view text, std::string& why);

class TuneStore {
 public:
  // Folders as prepare_folder() returns them. `layers` are searched
  // first and never changed. If `folder` is empty, no record is kept.
  explicit TuneStore(std::string folder, std::vector<std::string> layers = {})
      : folder_(std::move(folder)), layers_(std::move(layers)) {}

  // As DiskCache::use_signatures.
  void use_signatures(Verifier verifier, Signer signer) {
    verifier_ = std::move(verifier);
    signer_ = std::move(signer);
  }

  struct Found {
    TuneRecord record;
    std::string path;
    bool bundled = false;  // from a layer
    std::string
        first_guess{};        // how `here` differs from the environment of the measurement; empty: not at all
    std::string signature{};  // the line of signature.hpp; empty: none

    // Whether measuring again would be pointless: a bundle's
    // record wins anyway, and one of our own was made here.
    bool is_current() const { return bundled || first_guess.empty(); }
  };
  // The record of the first folder that has one. A bundle's record wins
  // wherever it was made, so that its kernels are the ones asked for. A
  // damaged file is a miss, and is set aside. *why is empty on a plain miss.
  std::optional<Found> lookup(const TuneKey& key, const TuneEnvironment& here,
                              std::string* why = nullptr) const;

  // The path where the key's record in `folder` is or would be.
  std::string path(const TuneKey& key) const;
  // The same within any cache folder: "tune/DEVICE/DIGEST.json".
  static std::string name(const TuneKey& key);
  // Writes the record to `folder`, in place of an older one, with the line of its signature if it has one.
  // Returns false with the reason in *why.
  bool publish(const TuneRecord& record, std::string* why = nullptr, const std::string& signature = {}) const;

  struct Listing {
    std::string path;
    bool bundled = false;
    std::optional<TuneRecord> record;  // absent if damaged
    std::string damage;                // why the record is absent
    std::string signature{};           // as in Found
  };
  // Lists the records of all folders, in order of lookup, then of path. Moves nothing.
  std::vector<Listing> list() const;

 private:
  std::string folder_;
  std::vector<std::string> layers_;
  Verifier verifier_;
  Signer signer_;
};

}  // namespace flashjit
