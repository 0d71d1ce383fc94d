// Tune records on disk.
//
//   FOLDER/tune/DEVICE/DIGEST.json   a record: to_json() of it and nothing else
//
// DEVICE is the device's name in lower case with dashes, DIGEST that of the key. Files appear and are set
// aside as entries are (folder.hpp).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/key.hpp"
#include "cache/tune_record.hpp"

namespace flashjit {

inline constexpr int tune_format_version = 1;

// The key whose digest names the record's file, and which is locked while somebody tunes (DiskCache::lock).
Key cache_key(const TuneKey& key);

// Reads a record out of bytes that nobody vouches for: nothing, with the reason in `why`, unless they are
// exactly what to_json() gives for some record.
std::optional<TuneRecord> parse_tune_record(std::string_view text, std::string& why);

class TuneStore {
 public:
  // Folders as prepare_folder() gives them. Of `layers` nothing is ever written or moved; they come first.
  // `folder` may be empty: then nothing is kept.
  explicit TuneStore(std::string folder, std::vector<std::string> layers = {})
      : folder_(std::move(folder)), layers_(std::move(layers)) {}

  struct Found {
    TuneRecord record;
    std::string path;
    bool bundled = false;       // from a layer
    std::string first_guess{};  // in what `here` differs from where it was measured; empty: it is exact

    // A measurement here would not be of something else: a bundle's wins anyway, ours was made here.
    bool is_current() const { return bundled || first_guess.empty(); }
  };
  // The record of the first folder that has one: a bundle's choices win, wherever they were made, so that
  // what was prebuilt is what is asked for. A damaged file is a miss, and set aside. *why: empty on a plain
  // miss.
  std::optional<Found> lookup(const TuneKey& key, const TuneEnvironment& here,
                              std::string* why = nullptr) const;

  // Where that key's record in `folder` is or would be.
  std::string path(const TuneKey& key) const;
  // Into `folder`, in place of what is there. False with the reason in *why.
  bool publish(const TuneRecord& record, std::string* why = nullptr) const;

  struct Listing {
    std::string path;
    bool bundled = false;
    std::optional<TuneRecord> record;  // absent when damaged
    std::string damage;                // why, when absent
  };
  // Of all folders, in order of lookup, then of path. Moves nothing.
  std::vector<Listing> list() const;

 private:
  std::string folder_;
  std::vector<std::string> layers_;
};

}  // namespace flashjit
