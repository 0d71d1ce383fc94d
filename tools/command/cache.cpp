// flashjit cache: lists, checks and limits the entries on disk.
#include "tools/command/cache.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <iostream>
#include <map>
#include <memory>

#include "cache/bundle.hpp"
#include "cache/config_json.hpp"
#include "cache/remote_cache.hpp"
#include "cache/tune_store.hpp"
#include "codegen/base/suggest.hpp"
#include "runtime/build.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/verbs.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {

DiskCache CacheOptions::cache(bool made) const {
  const std::string name = folder.value_or(DiskCache::default_folder());
  if (name.empty()) {
    throw Error(ErrorCode::cache_failed,
                "there is no cache folder: none of FLASHJIT_CACHE_DIR, XDG_CACHE_HOME and HOME is set; give "
                "--cache-dir");
  }
  if (folder && !made && ::access(name.c_str(), F_OK) != 0) {
    throw Error(ErrorCode::cache_failed, "cache folder " + in_quotes(name) + ": " + error_text(errno) +
                                             "; --cache-dir takes a folder that exists, and without it "
                                             "FLASHJIT_CACHE_DIR or ~/.cache/flashjit is meant");
  }
  DiskCache cache(name, made ? DiskCache::Access::read_write : DiskCache::Access::inspect);
  cache.use_signatures(verifier(trusted_keys({})), signer(signing_key_path({})));
  return cache;
}

std::vector<DiskCache> CacheOptions::folders() const {
  std::vector<DiskCache> all = open_cache("", layers).layers;
  if (all.empty() || !folder.value_or(DiskCache::default_folder()).empty()) all.push_back(cache());
  return all;
}

std::string field(const CacheKey& key, std::string_view label) {
  const std::string* value = key.find(label);
  return value ? *value : std::string();
}

Json fields_json(const CacheKey& key) {
  Json fields = Json::object();
  for (const CacheKeyField& f : key.fields()) fields[f.label] = f.value;
  return fields;
}

namespace {

std::string time_text(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", localtime_r(&time, &parts))};
}

// Another version of flashjit may have written the config in another form; the text itself is shown then.
std::string short_config(const CacheEntry& entry) {
  try {
    const auto metadata = nlohmann::json::parse(entry.metadata);
    return to_text(config_from_json(metadata.at("config")), Target::parse(field(entry.key, "target")));
  } catch (const std::exception&) {  // Error, Json::exception
    return field(entry.key, "config");
  }
}

bool is_layer(const DiskCache& folder) {
  return folder.access() == DiskCache::Access::read_only;
}

void print_damaged(const std::string& path, const std::string& damage) {
  std::cerr << "damaged: " << path << ": " << damage << '\n';
}

int ls(const CacheOptions& options) {
  Json rows = Json::array();
  for (const DiskCache& folder : options.folders()) {
    const std::vector<DiskCache::Listing> list = folder.list(false);
    verify::Table table({"key", "target", "config", "bytes", "used", "spec"});
    for (const DiskCache::Listing& item : list) {
      Json row = {{"path", item.path},
                  {"layer", is_layer(folder)},
                  {"bytes", item.size},
                  {"used", item.used},
                  {"damage", item.damage}};
      if (item.entry) {
        const CacheKey& key = item.entry->key;
        row["key"] = key.digest();
        row["fields"] = fields_json(key);
        row["metadata"] = Json::parse(item.entry->metadata, nullptr, false);
        table.add({key.digest(), field(key, "target"), short_config(*item.entry), std::to_string(item.size),
                   time_text(item.used), field(key, "spec")});
      }
      rows.push_back(row);
    }
    if (options.json) continue;
    if (is_layer(folder)) std::cout << folder.folder() << ", read-only:\n";
    std::cout << shown(table);
    for (const DiskCache::Listing& item : list) {
      if (!item.entry) print_damaged(item.path, item.damage);
    }
  }
  if (options.json) print_json(rows);
  return exit_ok;
}

int stat(const CacheOptions& options) {
  Json folders = Json::array();
  for (const DiskCache& folder : options.folders()) {
    std::map<std::string, std::int64_t> by_target;
    std::int64_t entries = 0, damaged = 0;
    std::uint64_t bytes = 0;
    const Progress progress("reading " + folder.folder());
    for (const DiskCache::Listing& item : folder.list(true)) {
      bytes += item.size;
      if (!item.entry) {
        ++damaged;
        continue;
      }
      ++entries;
      ++by_target[field(item.entry->key, "target")];
    }
    const std::size_t records = records_of(folder).list().size();
    folders.push_back({{"folder", folder.folder()},
                       {"layer", is_layer(folder)},
                       {"entries", entries},
                       {"damaged", damaged},
                       {"bytes", bytes},
                       {"tune_records", records},
                       {"entries_by_target", by_target}});
    const RemoteCounts remote = remote_counts(folder.folder());
    if (!is_layer(folder)) {
      folders.back()["max_bytes"] = DiskCache::default_max_bytes();
      folders.back()["remote"] = {{"hits", remote.hits},
                                  {"misses", remote.misses},
                                  {"stored", remote.stored},
                                  {"refused", remote.refused},
                                  {"failed", remote.failed}};
    }
    if (options.json) continue;
    std::cout << folder.folder() << (is_layer(folder) ? ", read-only: " : ": ") << entries << " entries, "
              << damaged << " damaged, " << bytes << " bytes";
    if (!is_layer(folder)) std::cout << " of at most " << DiskCache::default_max_bytes();
    std::cout << "; " << records << " tune records\n";
    if (!is_layer(folder) && remote.hits + remote.misses + remote.stored + remote.refused + remote.failed > 0)
      std::cout << "  remote stores: " << remote.hits << " hits, " << remote.misses << " misses, "
                << remote.stored << " objects stored, " << remote.refused << " refused, " << remote.failed
                << " requests failed\n";
    for (const auto& [target, count] : by_target) std::cout << "  " << target << ": " << count << '\n';
  }
  if (options.json) {
    // The writable folder, and the layers within it.
    Json own = {{"folder", nullptr}};
    if (!folders.back()["layer"].get<bool>()) {
      own = folders.back();
      folders.erase(folders.size() - 1);
    }
    own["layers"] = folders;
    print_json(own);
  }
  return exit_ok;
}

int verify_all(const CacheOptions& options) {
  std::size_t entries = 0, records = 0, bad_entries = 0, bad_records = 0;
  Json damaged = Json::array();
  const auto add = [&](const auto& item, bool whole, std::size_t& count, std::size_t& bad) {
    ++count;
    if (whole) return;
    ++bad;
    damaged.push_back({{"path", item.path}, {"damage", item.damage}});
  };
  for (const DiskCache& folder : options.folders()) {
    const Progress progress("reading " + folder.folder());
    for (const auto& item : folder.list(true)) add(item, item.entry.has_value(), entries, bad_entries);
    for (const auto& item : records_of(folder).list())
      add(item, item.record.has_value(), records, bad_records);
  }
  if (options.json) {
    const DiskCache last = options.folders().back();
    print_json({{"folder", is_layer(last) ? Json() : Json(last.folder())},
                {"entries", entries},
                {"tune_records", records},
                {"damaged", damaged}});
  } else {
    std::cout << entries - bad_entries << " of " << entries << " entries and " << records - bad_records
              << " of " << records << " tune records are whole\n";
    for (const Json& item : damaged) print_damaged(item["path"], item["damage"]);
  }
  return damaged.empty() ? exit_ok : static_cast<int>(ErrorCode::cache_failed);
}

int gc(const CacheOptions& options, std::uint64_t max_bytes) {
  const DiskCache cache = options.cache();
  const Eviction result = cache.gc(max_bytes ? max_bytes : DiskCache::default_max_bytes());
  if (options.json) {
    print_json({{"folder", cache.folder()},
                {"removed_entries", result.removed},
                {"removed_bytes", result.removed_bytes},
                {"bytes", result.left_bytes},
                {"spared_entries", result.spared}});
  } else {
    std::cout << result.removed << " entries of " << result.removed_bytes << " bytes removed from "
              << cache.folder() << "; " << result.left_bytes << " bytes stay";
    if (result.spared > 0)
      std::cout << ", among them " << result.spared
                << " entries beyond the limit that were used within the last minute or are being built";
    std::cout << '\n';
  }
  return exit_ok;
}

int clear(const CacheOptions& options) {
  const DiskCache cache = options.cache();
  const std::size_t removed = cache.clear();
  if (options.json) {
    print_json({{"folder", cache.folder()}, {"removed_files", removed}});
  } else {
    std::cout << removed << " files removed from " << cache.folder() << '\n';
  }
  return exit_ok;
}

int path(const CacheOptions& options) {
  Json layers = Json::array(), own;
  for (const DiskCache& folder : options.folders()) {
    if (is_layer(folder))
      layers.push_back(folder.folder());
    else
      own = folder.folder();
  }
  if (options.json) {
    print_json({{"folder", own}, {"layers", layers}});
  } else {
    if (!own.is_null()) std::cout << own.get<std::string>() << '\n';
    for (const Json& layer : layers) std::cerr << "after " << layer.get<std::string>() << ", read-only\n";
  }
  return exit_ok;
}

CacheAction add_gc(const Arguments& app) {
  const auto max_bytes = std::make_shared<std::uint64_t>(0);
  app.add_option("--max-bytes", *max_bytes,
                 "Size limit of all entries [FLASHJIT_CACHE_MAX_BYTES, else 1 GiB]")
      .at_least(1)
      .type_name("N");
  app.footer(
      "An entry that was used within the last minute stays, since a process may be about to load it.\n\n"
      "Examples:\n  flashjit cache gc --max-bytes 100000000\n");
  return [max_bytes](const CacheOptions& options) { return gc(options, *max_bytes); };
}

// Adds an action that has no options of its own.
template <int (*run)(const CacheOptions&)>
CacheAction plain(const Arguments&) {
  return run;
}

}  // namespace

Verb add_cache(const Arguments& parent) {
  const Arguments app = parent.add_subcommand("cache", "Look into the disk cache");
  app.require_subcommand(1);
  const auto options = std::make_shared<CacheOptions>();
  const auto chosen = std::make_shared<CacheAction>();
  const auto add = [&](const char* name, const char* what, CacheAction (*declare)(const Arguments&)) {
    const Arguments verb = app.add_subcommand(name, what);
    const CacheAction action = declare(verb);
    add_cache_dir(verb, options->folder);
    add_cache_path(verb, options->layers);
    add_output(verb, options->json);
    verb.callback([chosen, action] { *chosen = action; });
  };
  add("ls", "List the entries", plain<ls>);
  add("stat", "How many entries, how large, for which targets", plain<stat>);
  add("verify", "Read every entry and tune record and check it; exit code 7 if one is damaged",
      plain<verify_all>);
  add("explain", "Show a key's fields, and in which of them it differs from another key", add_explain);
  add("gc", "Remove the least recently used entries until a size limit is kept", add_gc);
  add("export", "Write the entries and tune records into a plain tar", add_export);
  add("import", "Read entries and tune records from such a tar", add_import);
  add("clear", "Remove every entry and every file set aside; tune records stay", plain<clear>);
  add("path", "Print the folder", plain<path>);
  add("push", "Store the entries and tune records in the remote stores", add_push);
  add("pull", "Get what was pushed to the remote stores", add_pull);
  add("sync", "Pull, then push", add_sync);
  add("keygen", "Make a key that signs entries and tune records", add_keygen);
  add("sign", "Sign the entries and tune records of the folder", add_sign);
  add("trust", "List the trusted keys, or add keys to a file of them", add_trust);
  app.footer(
      "Examples:\n"
      "  flashjit cache ls\n"
      "  flashjit cache stat --json\n"
      "  flashjit cache verify --cache-dir /srv/kernels\n"
      "  flashjit cache explain --spec spec.json --target sm_90\n");
  return {app, [options, chosen] { return (*chosen)(*options); }};
}

}  // namespace flashjit::command
