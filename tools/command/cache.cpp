// flashjit cache: what lies on disk, whether it is whole, and why something was not found there.
#include <algorithm>
#include <ctime>
#include <iostream>
#include <limits>
#include <map>
#include <memory>

#include "cache/disk_cache.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/render.hpp"
#include "codegen/search_space.hpp"
#include "runtime/compiler.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct Options {
  std::optional<std::string> folder;
  std::vector<std::string> keys;
  std::string spec, target = "native";
  ShapeOptions shape;
  bool json = false;
};

std::string folder_of(const Options& options) {
  std::string folder = options.folder.value_or(DiskCache::default_folder());
  if (folder.empty()) {
    throw Error(ErrorCode::cache_failed,
                "there is no cache folder: none of FLASHJIT_CACHE_DIR, XDG_CACHE_HOME and HOME is set; give "
                "--cache-dir");
  }
  return folder;
}

std::string field(const Key& key, std::string_view label) {
  const std::string* value = key.find(label);
  return value ? *value : std::string();
}

std::string time_text(std::int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", localtime_r(&time, &parts))};
}

Json fields_json(const Key& key) {
  Json fields = Json::object();
  for (const KeyField& f : key.fields()) fields[f.label] = f.value;
  return fields;
}

void print_damage(const std::vector<DiskCache::Listing>& list) {
  for (const DiskCache::Listing& item : list) {
    if (!item.entry) std::cerr << "damaged: " << item.path << ": " << item.damage << '\n';
  }
}

int ls(const Options& options) {
  const std::vector<DiskCache::Listing> list = DiskCache(folder_of(options)).list(false);
  if (options.json) {
    Json rows = Json::array();
    for (const DiskCache::Listing& item : list) {
      Json row = {
          {"path", item.path}, {"bytes", item.size}, {"modified", item.modified}, {"damage", item.damage}};
      if (item.entry) {
        row["key"] = item.entry->key.digest();
        row["fields"] = fields_json(item.entry->key);
        row["metadata"] = Json::parse(item.entry->metadata, nullptr, false);
      }
      rows.push_back(row);
    }
    print_json(rows);
    return exit_ok;
  }
  verify::Table table({"key", "target", "config", "bytes", "written", "spec"});
  for (const DiskCache::Listing& item : list) {
    if (!item.entry) continue;
    const Key& key = item.entry->key;
    table.add({key.digest(), field(key, "target"), field(key, "config"), std::to_string(item.size),
               time_text(item.modified), field(key, "spec")});
  }
  std::cout << table.str();
  print_damage(list);
  return exit_ok;
}

int stat(const Options& options) {
  const DiskCache cache(folder_of(options));
  std::map<std::string, std::int64_t> by_target;
  std::int64_t entries = 0, damaged = 0;
  std::uint64_t bytes = 0;
  for (const DiskCache::Listing& item : cache.list(false)) {
    bytes += item.size;
    if (!item.entry) {
      ++damaged;
      continue;
    }
    ++entries;
    ++by_target[field(item.entry->key, "target")];
  }
  if (options.json) {
    print_json({{"folder", cache.folder()},
                {"entries", entries},
                {"damaged", damaged},
                {"bytes", bytes},
                {"entries_by_target", by_target}});
    return exit_ok;
  }
  std::cout << cache.folder() << ": " << entries << " entries, " << bytes << " bytes, " << damaged
            << " damaged\n";
  for (const auto& [target, count] : by_target) std::cout << "  " << target << ": " << count << '\n';
  return exit_ok;
}

int verify_entries(const Options& options) {
  const DiskCache cache(folder_of(options));
  const Progress progress("reading " + cache.folder());
  const std::vector<DiskCache::Listing> list = cache.list(true);
  const auto damaged = std::count_if(list.begin(), list.end(), [](const auto& item) { return !item.entry; });
  if (options.json) {
    Json paths = Json::array();
    for (const DiskCache::Listing& item : list) {
      if (!item.entry) paths.push_back({{"path", item.path}, {"damage", item.damage}});
    }
    print_json({{"folder", cache.folder()}, {"entries", list.size()}, {"damaged", paths}});
  } else {
    std::cout << list.size() - damaged << " of " << list.size() << " entries are whole\n";
    print_damage(list);
  }
  return damaged ? static_cast<int>(ErrorCode::cache_failed) : exit_ok;
}

// The one entry whose digest starts like that.
Key find_key(const std::vector<DiskCache::Listing>& list, const std::string& prefix) {
  const Key* found = nullptr;
  for (const DiskCache::Listing& item : list) {
    if (!item.entry || !item.entry->key.digest().starts_with(prefix)) continue;
    if (found)
      throw Error(ErrorCode::invalid_argument,
                  "several entries start with '" + prefix + "': give more digits");
    found = &item.entry->key;
  }
  if (!found) {
    throw Error(ErrorCode::invalid_argument,
                "no entry starts with '" + prefix + "'; 'flashjit cache ls' lists them");
  }
  return *found;
}

// What would be looked up for the spec now.
Key wanted_key(const Options& options) {
  const AttentionSpec spec = read_spec(options.spec);
  const Target target = Target::parse(options.target);
  const KernelSource source =
      render(spec, target, heuristic_config(spec, target, bucket(options.shape.shape())));
  const std::shared_ptr<const Compiler> compiler = compiler_for(target);
  return entry_key(request_key(spec, source), compiler->options(source), compiler->identity());
}

std::size_t fields_in_common(const Key& a, const Key& b) {
  return std::count_if(a.fields().begin(), a.fields().end(), [&](const KeyField& f) {
    const std::string* other = b.find(f.label);
    return other && *other == f.value;
  });
}

int explain(const Options& options) {
  const std::vector<DiskCache::Listing> list = DiskCache(folder_of(options)).list(false);
  const Key key = options.spec.empty() ? find_key(list, options.keys.front()) : wanted_key(options);
  std::optional<Key> other;
  bool hit = false;
  if (options.spec.empty()) {
    if (options.keys.size() > 1) other = find_key(list, options.keys[1]);
  } else {
    std::size_t most = 0;
    for (const DiskCache::Listing& item : list) {
      if (!item.entry) continue;
      const std::size_t common = fields_in_common(key, item.entry->key);
      hit = hit || item.entry->key == key;
      if (common <= most) continue;
      most = common;
      other = item.entry->key;
    }
  }
  const std::string difference = other ? explain_difference(key, *other) : "";
  if (options.json) {
    Json json = {
        {"key", key.digest()}, {"fields", fields_json(key)}, {"other", nullptr}, {"difference", difference}};
    if (other) json["other"] = other->digest();
    if (!options.spec.empty()) json["found"] = hit;
    print_json(json);
    return exit_ok;
  }
  std::cout << key.digest() << '\n';
  for (const KeyField& f : key.fields()) std::cout << "  " << f.label << ": " << f.value << '\n';
  if (hit) {
    std::cout << "is in the cache\n";
  } else if (other) {
    std::cout << (options.spec.empty() ? "differs from " : "is not in the cache; the closest entry is ")
              << other->digest() << (options.spec.empty() ? " in\n" : ", which differs in\n") << difference
              << (difference.empty() || difference.ends_with('\n') ? "" : "\n");
  } else if (!options.spec.empty()) {
    std::cout << "is not in the cache, nor is anything like it\n";
  }
  return exit_ok;
}

int clear(const Options& options) {
  const DiskCache cache(folder_of(options));
  const std::size_t removed = cache.clear();
  if (options.json) {
    print_json({{"folder", cache.folder()}, {"removed_files", removed}});
  } else {
    std::cout << removed << " files removed from " << cache.folder() << '\n';
  }
  return exit_ok;
}

int path(const Options& options) {
  if (options.json) {
    print_json({{"folder", folder_of(options)}});
  } else {
    std::cout << folder_of(options) << '\n';
  }
  return exit_ok;
}

}  // namespace

Verb add_cache(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("cache", "Look into the disk cache");
  const auto options = std::make_shared<Options>();
  app->require_subcommand(1);
  const auto action = std::make_shared<std::function<int(const Options&)>>();
  const auto add = [&](const char* name, const char* what, int (*run)(const Options&)) {
    CLI::App* verb = app->add_subcommand(name, what);
    add_cache_dir(*verb, options->folder);
    add_json(*verb, options->json);
    verb->callback([action, run] { *action = run; });
    return verb;
  };
  add("ls", "List the entries", ls);
  add("stat", "How many entries, how large, for which targets", stat);
  add("verify", "Read every entry and check it; exit code 7 if one is damaged", verify_entries);
  add("clear", "Remove every entry and everything set aside", clear);
  add("path", "Print the folder", path);
  CLI::App* why =
      add("explain", "What a key is made of, and in which fields it differs from another", explain);
  CLI::Option* keys =
      why->add_option("KEY", options->keys, "One or two entries: digests or their first digits")
          ->expected(1, 2);
  CLI::Option* spec =
      why->add_option("--spec", options->spec, "What would be looked up for this spec, and if it is there");
  keys->excludes(spec);
  why->add_option("--target", options->target, "Of --spec")->needs(spec)->capture_default_str();
  options->shape.add(*why);
  why->footer(
      "Examples:\n"
      "  flashjit cache explain 3f2a\n"
      "  flashjit cache explain 3f2a 9b41\n"
      "  flashjit cache explain --spec spec.json --target sm_90 --seqlen-q 4096\n");
  app->footer(
      "Examples:\n"
      "  flashjit cache ls\n"
      "  flashjit cache stat --json\n"
      "  flashjit cache verify --cache-dir /srv/kernels\n"
      "  flashjit cache explain --spec spec.json --target sm_90\n");
  return {app, [options, action] { return (*action)(*options); }};
}

}  // namespace flashjit::command
