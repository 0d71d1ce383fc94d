#include "runtime/tune/records.hpp"

#include <utility>

#include "cache/transfer.hpp"

namespace flashjit {
namespace {

void add_reason(std::string* why, const std::string& reason) {
  if (why && !reason.empty()) *why += (why->empty() ? "" : "; ") + reason;
}

}  // namespace

RemoteRecord take_record(const RemoteCache::Got& got, const TuneKey& key, const TuneEnvironment& here,
                         const TuneStore& records, std::string* why) {
  if (got.answer != Answer::yes) return {got.answer};
  const SignedBytes parts = split_signature(got.bytes);
  std::string damage;
  std::optional<TuneRecord> record = parse_tune_record(parts.body, damage);
  if (record && record->key != key) damage = "holds the record of another key";
  if (!damage.empty()) {
    add_reason(why, "a record of a remote store cannot be used: " + damage);
    return {Answer::no};
  }
  const std::optional<TuneStore::Found> seen = records.lookup(key, here);
  if (seen && is_step_back(parts.line, seen->signature)) {
    add_reason(why, "a remote store has a record that its key signed before " + seen->path);
    return {Answer::no};
  }
  std::string first_guess = difference(record->environment, here), path = records.path(key), reason;
  const std::string line(parts.line);
  if (path.empty() || !records.publish(*record, &reason, line)) {
    add_reason(why, reason);
    path = TuneStore::name(key) + " of a remote store";
  }
  return {Answer::yes,
          TuneStore::Found{std::move(*record), std::move(path), false, std::move(first_guess), line}};
}

RemoteRecord remote_record(RemoteCache& remote, const TuneKey& key, const TuneEnvironment& here,
                           const TuneStore& records, std::string* why, bool again) {
  const auto note = [&](const std::string& reason) { add_reason(why, reason); };
  return take_record(remote.get(TuneStore::name(key), note, again), key, here, records, why);
}

std::optional<TuneStore::Found> find_record(const TuneStore& records, const OpenedCache& cache,
                                            const TuneKey& key, const TuneEnvironment& here,
                                            std::string* why) {
  std::optional<TuneStore::Found> found = records.lookup(key, here, why);
  if (!cache.remote || (found && found->is_current())) return found;
  RemoteRecord remote = remote_record(*cache.remote, key, here, records, why);
  return remote.found ? std::move(remote.found) : std::move(found);
}

}  // namespace flashjit
