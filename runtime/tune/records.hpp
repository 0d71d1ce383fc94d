// Tune records of the folders and of the remote stores.
#pragma once

#include <optional>
#include <string>

#include "cache/remote_cache.hpp"
#include "cache/tune_store.hpp"
#include "runtime/build.hpp"

namespace flashjit {

// A store's record for the key. Answer::no: there is none, or what is there cannot be used, and *why says so.
struct RemoteRecord {
  Answer answer = Answer::no;
  std::optional<TuneStore::Found> found{};
};

// Reads the record that a store gave under the key's name, and keeps it in the folder of `records`. A record
// older than the one there, if both are signed by one key, is not used.
RemoteRecord take_record(const RemoteCache::Got& got, const TuneKey& key, const TuneEnvironment& here,
                         const TuneStore& records, std::string* why);

// Asks the store now, or, unless `again`, only if it had the record or was not asked a moment ago.
RemoteRecord remote_record(RemoteCache& remote, const TuneKey& key, const TuneEnvironment& here,
                           const TuneStore& records, std::string* why, bool again = false);

// The record of the folders if it is current, else that of the remote stores, else that of the folders.
std::optional<TuneStore::Found> find_record(const TuneStore& records, const OpenedCache& cache,
                                            const TuneKey& key, const TuneEnvironment& here,
                                            std::string* why);

}  // namespace flashjit
