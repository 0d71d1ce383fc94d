#include "cache/bundle.hpp"

#include <cerrno>
#include <optional>

#include "cache/kernel_entry.hpp"
#include "codegen/base/error.hpp"
#include "codegen/base/suggest.hpp"

namespace flashjit {
namespace {

constexpr std::uint64_t max_record_size = std::uint64_t{4} << 20;  // with a signature

std::string relative(const std::string& path, const std::string& folder) {
  return path.substr(folder.size() + 1);
}

// Why a member of this name and type is not read; empty if it may be.
std::string why_not_read(const ArchiveMember& member) {
  if (member.type == '1' || member.type == '2') return "a link";
  if (member.type != '0') return "not a regular file";
  if (member.name.starts_with('/')) return "an absolute path";
  if (("/" + member.name + "/").find("/../") != std::string::npos) return "a path that climbs out";
  const std::string version = "v" + std::to_string(entry_format_version) + "/";
  if (member.name.starts_with(version) || member.name.starts_with("tune/")) return {};
  return "not of a cache of this version, whose files are in " + version + " and tune/";
}

std::string import_entry(const DiskCache& cache, const ArchiveMember& member, const ByteSource& content) {
  CacheEntry entry;
  if (std::string damage = decode_entry(member.size, content, true, entry); !damage.empty()) return damage;
  if (relative(cache.path(entry.key), cache.folder()) != member.name) return "holds another key";
  if (!unpack_kernel(entry)) return "does not describe a kernel";
  std::string why;
  return cache.publish(entry, &why) ? "" : why;
}

std::string import_record(const TuneStore& store, const std::string& folder, const ArchiveMember& member,
                          const ByteSource& content) {
  if (member.size > max_record_size) return "larger than a tune record";
  std::string text(static_cast<std::size_t>(member.size), '\0'), why;
  if (!content(text.data(), text.size())) return "ends early";
  const SignedBytes parts = split_signature(text);
  const std::optional<TuneRecord> record = parse_tune_record(parts.body, why);
  if (!record) return why;
  if (relative(store.path(record->key), folder) != member.name) return "holds the record of another key";
  return store.publish(*record, &why, std::string(parts.line)) ? "" : why;
}

}  // namespace

TuneStore records_of(const DiskCache& cache) {
  TuneStore store(cache.folder());
  store.use_signatures(cache.verifier(), cache.signer());
  return store;
}

Exported export_bundle(const DiskCache& cache, const ByteSink& sink) {
  Exported result;
  const auto require = [&](bool written) {
    if (!written)
      throw Error(ErrorCode::cache_failed,
                  "exporting " + cache.folder() + ": the archive cannot be written: " + error_text(errno));
  };
  const auto add = [&](const std::string& path, std::string_view bytes) {
    require(write_member(sink, relative(path, cache.folder()), bytes));
  };
  for (const DiskCache::Listing& item : cache.list(false)) {
    std::string why = item.damage;
    const std::optional<CacheEntry> entry = item.entry ? cache.lookup(item.entry->key, &why) : std::nullopt;
    const std::optional<std::string> bytes = entry ? encode_entry(*entry, why) : std::nullopt;
    if (!bytes) {
      result.left_out.push_back(item.path + ": " + why);
      continue;
    }
    add(item.path, *bytes);
    ++result.entries;
  }
  for (const TuneStore::Listing& item : records_of(cache).list()) {
    if (!item.record) {
      result.left_out.push_back(item.path + ": " + item.damage);
      continue;
    }
    add(item.path, to_json(*item.record) + item.signature);
    ++result.records;
  }
  require(write_archive_end(sink));
  return result;
}

Imported import_bundle(const DiskCache& cache, const ByteSource& read) {
  Imported result;
  const TuneStore store = records_of(cache);
  result.damage = read_archive(read, [&](const ArchiveMember& member, const ByteSource& content) {
    // Skips folders, and the records in which pax archives keep times and owners.
    if (member.type == '5' || member.type == 'x' || member.type == 'g') return;
    std::string reason = why_not_read(member);
    const bool is_record = member.name.starts_with("tune/");
    if (reason.empty()) {
      reason = is_record ? import_record(store, cache.folder(), member, content)
                         : import_entry(cache, member, content);
    }
    if (!reason.empty()) {
      result.refused.push_back(in_quotes(member.name) + ": " + reason);
    } else {
      ++(is_record ? result.records : result.entries);
    }
  });
  return result;
}

}  // namespace flashjit
