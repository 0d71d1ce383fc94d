#include "cache/transfer.hpp"

#include <chrono>
#include <set>
#include <sstream>
#include <utility>

#include "cache/bundle.hpp"
#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
namespace {

constexpr std::chrono::milliseconds index_lease{10'000};

std::string index_name(const std::string& key) {
  return "index/" + key;
}

std::set<std::string> names_of_index(std::string_view body) {
  std::set<std::string> names;
  std::istringstream lines{std::string(body)};
  for (std::string line; std::getline(lines, line);) names.insert(line);
  return names;
}

// One transfer between a folder and a store.
class Transfer {
 public:
  Transfer(const DiskCache& cache, RemoteCache& remote)
      : cache_(cache), remote_(remote), records_(records_of(cache)) {}

  Transferred push(const Signer& signer, const std::string& key) {
    std::set<std::string> names;
    const auto sign = [&](const std::string& name, std::string& bytes) {
      if (split_signature(bytes).line.empty()) bytes += signer(name, bytes);
    };
    for (const DiskCache::Listing& item : cache_.list(false)) {
      std::string why = item.damage;
      const std::optional<CacheEntry> entry =
          item.entry ? cache_.lookup(item.entry->key, &why) : std::nullopt;
      std::optional<std::string> bytes = entry ? encode_entry(*entry, why) : std::nullopt;
      if (!bytes) {
        fail(item.path, why);
        continue;
      }
      const std::string name = DiskCache::name(entry->key);
      const Answer there = remote_.exists(name, why);
      if (there == Answer::failed) return stop(name, why);
      if (there == Answer::no) {
        sign(name, *bytes);
        if (remote_.put_now(name, std::move(*bytes), why) != Answer::yes) return stop(name, why);
      }
      if (remote_.put_now(DiskCache::request_name(request_of(entry->key)), entry->key.digest(), why) !=
          Answer::yes)
        return stop(name, why);
      ++(there == Answer::yes ? result_.present : result_.entries);
      names.insert(name);
    }
    for (const TuneStore::Listing& item : records_.list()) {
      if (!item.record) {
        fail(item.path, item.damage);
        continue;
      }
      const std::string name = TuneStore::name(item.record->key), body = to_json(*item.record);
      std::string bytes = body + item.signature, why;
      const RemoteCache::Got theirs = get(name, why);
      if (theirs.answer == Answer::failed) return stop(name, why);
      names.insert(name);
      if (theirs.answer == Answer::yes &&
          (split_signature(theirs.bytes).body == body ||
           is_step_back(item.signature, split_signature(theirs.bytes).line))) {
        ++result_.present;
        continue;
      }
      sign(name, bytes);
      if (remote_.put_now(name, std::move(bytes), why) != Answer::yes) return stop(name, why);
      ++result_.records;
    }
    return add_to_index(std::move(names), signer, key);
  }

  Transferred pull(const Trust& trust) {
    std::set<std::string> names;
    for (const auto& [key, owner] : trust.names()) {
      std::string why;
      const RemoteCache::Got index = get(index_name(key), why);
      if (index.answer == Answer::failed) return stop(index_name(key), why);
      if (index.answer == Answer::yes) names.merge(names_of_index(split_signature(index.bytes).body));
    }
    for (const std::string& name : names) {
      std::string why;
      const bool is_entry = DiskCache::is_name(name);
      if (!is_entry && !name.starts_with("tune/")) {
        fail(name, "is of no cache of this version");
        continue;
      }
      RemoteCache::Got got = get(name, why);
      if (got.answer == Answer::failed) return stop(name, why);
      if (got.answer == Answer::no) {
        fail(name, why.empty() ? "is in the index, but not there" : why);
        continue;
      }
      why = is_entry ? keep_entry(name, std::move(got.bytes)) : keep_record(name, got.bytes);
      if (!why.empty()) fail(name, why);
    }
    return std::move(result_);
  }

 private:
  RemoteCache::Got get(const std::string& name, std::string& why) {
    return remote_.get(
        name, [&](const std::string& reason) { why += (why.empty() ? "" : "; ") + reason; }, true);
  }

  void fail(const std::string& name, const std::string& why) { result_.failed.push_back(name + ": " + why); }
  Transferred stop(const std::string& name, const std::string& why) {
    fail(name, why);
    return std::move(result_);
  }

  Transferred add_to_index(std::set<std::string> names, const Signer& signer, const std::string& key) {
    if (names.empty()) return std::move(result_);
    const std::string name = index_name(key);
    std::string why;
    // Two pushes at once would each drop what the other adds.
    const RemoteCache::Fetched held = remote_.fetch(name, {.lease = index_lease, .patience = index_lease}, {},
                                                    {}, [](const RemoteCache::Got&) { return false; });
    const RemoteCache::Got before = get(name, why);
    if (before.answer == Answer::failed) return stop(name, why);
    if (before.answer == Answer::yes) names.merge(names_of_index(split_signature(before.bytes).body));
    std::string body;
    for (const std::string& one : names) body += one + "\n";
    body += signer(name, body);
    if (remote_.put_now(name, std::move(body), why) != Answer::yes) fail(name, why);
    return std::move(result_);
  }

  std::string keep_entry(const std::string& name, std::string bytes) {
    CacheEntry entry;
    if (std::string damage = decode_entry(bytes, entry); !damage.empty()) return damage;
    if (DiskCache::name(entry.key) != name) return "holds another key";
    const CacheKey key = entry.key;
    if (!unpack_kernel(std::move(entry))) return "does not describe a kernel";
    if (cache_.lookup(key)) {
      ++result_.present;
      return {};
    }
    std::string why;
    if (!cache_.publish_bytes(key, std::move(bytes), Flush::yes, &why)) return why;
    ++result_.entries;
    return {};
  }

  std::string keep_record(const std::string& name, const std::string& bytes) {
    const SignedBytes parts = split_signature(bytes);
    std::string why;
    const std::optional<TuneRecord> record = parse_tune_record(parts.body, why);
    if (!record) return why;
    if (TuneStore::name(record->key) != name) return "holds the record of another key";
    const std::optional<TuneStore::Found> here = records_.lookup(record->key, {});
    if (here && (to_json(here->record) == parts.body || is_step_back(parts.line, here->signature))) {
      ++result_.present;
      return {};
    }
    if (!records_.publish(*record, &why, std::string(parts.line))) return why;
    ++result_.records;
    return {};
  }

  const DiskCache& cache_;
  RemoteCache& remote_;
  const TuneStore records_;
  Transferred result_;
};

}  // namespace

bool is_step_back(std::string_view newer, std::string_view older) {
  const std::optional<Signature> a = parse_signature(newer), b = parse_signature(older);
  return a && b && a->key == b->key && a->time < b->time;
}

Transferred push_folder(const DiskCache& cache, RemoteCache& remote, const Signer& signer,
                        const std::string& key) {
  return Transfer(cache, remote).push(signer, key);
}

Transferred pull_folder(const DiskCache& cache, RemoteCache& remote, const Trust& trust) {
  return Transfer(cache, remote).pull(trust);
}

}  // namespace flashjit
