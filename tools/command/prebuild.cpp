// flashjit prebuild: compiles every kernel of a manifest into a folder, on any machine.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "cache/trust.hpp"
#include "cache/tune_store.hpp"
#include "codegen/families/search_space.hpp"
#include "runtime/build.hpp"
#include "runtime/compile_watch.hpp"
#include "runtime/jobs.hpp"
#include "runtime/thread_pool.hpp"
#include "tools/command/cache.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"
#include "tools/command/progress.hpp"
#include "tools/command/report.hpp"
#include "tools/command/verbs.hpp"
#include "tools/manifest/manifest.hpp"
#include "tools/verify/table.hpp"

namespace flashjit::command {
namespace {

struct PrebuildOptions {
  std::string manifest, out, records;
  ModelOptions model;
  std::vector<std::string> targets;
  std::optional<std::string> cache_dir, cache_path;
  CompileLimits limits;
  int jobs = 0;
  bool check = false, push = false, json = false;
};

struct Wanted {
  Target target;
  AttentionSpec spec;
  KernelConfig config;
};

struct Plan {
  std::vector<Wanted> kernels;
  std::vector<TuneRecord> records;  // records whose configs are among the kernels
};

// The records of --records that belong to the item: of its spec and that target, and of its shapes.
std::vector<TuneRecord> records_of(const ManifestItem& item, const Target& target,
                                   const std::vector<TuneStore::Listing>& listings) {
  std::vector<TuneRecord> records;
  for (const TuneStore::Listing& listing : listings) {
    if (!listing.record) continue;
    const TuneKey& key = listing.record->key;
    const bool covered =
        item.any_shape || std::any_of(item.shapes.begin(), item.shapes.end(),
                                      [&](const Shape& s) { return bucket(s) == key.bucket; });
    if (covered && key.spec == item.spec.to_json() && key.target == target.str() &&
        misfit(item.spec, target, listing.record->chosen).empty())
      records.push_back(*listing.record);
  }
  return records;
}

Plan make_plan(const PrebuildOptions& options) {
  const std::vector<ManifestItem> items = read_manifest(options.manifest, options.model);
  std::vector<TuneStore::Listing> listings;
  if (!options.records.empty()) listings = TuneStore(prepare_folder(options.records, Missing::refuse)).list();

  Plan plan;
  std::set<std::tuple<Target, std::string, KernelConfig>> seen;
  std::set<std::string> seen_records;
  for (const std::string& name : options.targets) {
    const Target target = Target::parse(name);
    for (const ManifestItem& item : for_target(items, target)) {
      std::vector<KernelConfig> configs;
      if (item.any_shape) {
        configs = heuristic_configs(item.spec, target);
      } else {
        for (const Shape& shape : item.shapes)
          configs.push_back(heuristic_config(item.spec, target, bucket(shape)));
      }
      for (TuneRecord& record : records_of(item, target, listings)) {
        configs.push_back(record.chosen);
        if (seen_records.insert(cache_key(record.key).digest()).second)
          plan.records.push_back(std::move(record));
      }
      for (const KernelConfig& config : configs) {
        if (seen.emplace(target, item.spec.to_json(), config).second)
          plan.kernels.push_back({target, item.spec, config});
      }
    }
  }
  return plan;
}

std::string described(const Wanted& kernel) {
  return kernel.target.str() + " " + to_text(kernel.config, kernel.target) + " " + kernel.spec.to_json();
}

// ---- prebuild ----

struct Outcome {
  KernelInfo info;
  std::uintmax_t bytes = 0;
  std::optional<Error> error;
};

Outcome build(const Wanted& kernel, const OpenedCache& cache, const CompileLimits& limits) {
  Outcome outcome;
  try {
    outcome.info = build_kernel(kernel.spec, kernel.target, kernel.config, cache, true, {}, limits, [&] {
                     tell_progress(described(kernel) + ": waiting for another process that builds it");
                   }).info;
    if (outcome.info.path.empty()) throw Error(ErrorCode::cache_failed, outcome.info.cache_note);
    std::error_code ignored;
    outcome.bytes = std::filesystem::file_size(outcome.info.path, ignored);
  } catch (const Error& error) {
    outcome.error = error;
  }
  return outcome;
}

// Compiles in parallel; stderr gets a line for each finished kernel.
std::vector<Outcome> build_all(const std::vector<Wanted>& kernels, const OpenedCache& cache, int jobs,
                               const CompileLimits& limits) {
  std::vector<Outcome> outcomes(kernels.size());
  std::size_t done = 0;
  std::mutex mutex;
  run_jobs(kernels.size(), jobs, [&](std::size_t i) {
    const Outcome& outcome = outcomes[i] = build(kernels[i], cache, limits);
    const std::lock_guard lock(mutex);
    tell_progress("[" + std::to_string(++done) + "/" + std::to_string(kernels.size()) + "] " +
                  described(kernels[i]) + ": " +
                  (outcome.error                         ? "failed: " + outcome.error->message()
                   : outcome.info.origin == Origin::disk ? "there already"
                                                         : number(outcome.info.compile_ms / 1e3) + " s, " +
                                                               std::to_string(outcome.bytes) + " bytes"));
    if (outcome.error && !outcome.error->detail().empty()) tell_progress(outcome.error->detail());
  });
  return outcomes;
}

struct Totals {
  int kernels = 0, compiled = 0, failed = 0;
  std::uintmax_t bytes = 0;
  double compile_seconds = 0;

  void add(const Outcome& outcome) {
    ++kernels;
    failed += outcome.error.has_value();
    bytes += outcome.bytes;
    if (outcome.error || outcome.info.origin != Origin::compiled) return;
    ++compiled;
    compile_seconds += outcome.info.compile_ms / 1e3;
  }
};

int prebuild(const PrebuildOptions& options) {
  const Plan plan = make_plan(options);
  for (const Wanted& kernel : plan.kernels) check_limits(options.limits, kernel.target);
  // Every user may read the folder; only its owner may write to it.
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::absolute(options.out, ignored).parent_path(), ignored);
  ::mkdir(options.out.c_str(), 0755);
  OpenedCache cache;  // has no size cap, so that every requested kernel stays
  cache.disk.emplace(options.out, DiskCache::Access::read_write, std::numeric_limits<std::uint64_t>::max());
  const int jobs = options.jobs > 0 ? options.jobs : available_cpus();

  const auto start = std::chrono::steady_clock::now();
  const std::vector<Outcome> outcomes = build_all(plan.kernels, cache, jobs, options.limits);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const TuneStore store(cache.disk->folder());
  for (const TuneRecord& record : plan.records) {
    std::string why;
    if (!store.publish(record, &why)) throw Error(ErrorCode::cache_failed, why);
  }

  Totals all;
  std::map<std::string, Totals> by_target;
  const Error* first_error = nullptr;
  Json list = Json::array();
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    const Outcome& outcome = outcomes[i];
    const Wanted& kernel = plan.kernels[i];
    all.add(outcome);
    by_target[kernel.target.str()].add(outcome);
    if (outcome.error && !first_error) first_error = &*outcome.error;
    Json row = {{"target", kernel.target.str()},
                {"spec", Json::parse(kernel.spec.to_json())},
                {"config", config_json(kernel.config)}};
    if (outcome.error) {
      row["error"] = outcome.error->message();
      row["detail"] = outcome.error->detail();
    } else {
      row["key"] = outcome.info.cache_key;
      row["origin"] = to_string(outcome.info.origin);
      row["compile_ms"] = outcome.info.compile_ms;
      row["bytes"] = outcome.bytes;
    }
    list.push_back(row);
  }
  const double seconds_per_kernel = all.compiled ? seconds / all.compiled : 0;
  if (options.json) {
    print_json({{"folder", cache.disk->folder()},
                {"jobs", jobs},
                {"seconds", seconds},
                {"compiled", all.compiled},
                {"seconds_per_kernel", seconds_per_kernel},
                {"failed", all.failed},
                {"bytes", all.bytes},
                {"tune_records", plan.records.size()},
                {"kernels", list}});
  } else {
    verify::Table table({"target", "kernels", "compiled", "failed", "bytes", "compile s, mean"});
    for (const auto& [target, t] : by_target) {
      table.add({target, std::to_string(t.kernels), std::to_string(t.compiled), std::to_string(t.failed),
                 std::to_string(t.bytes), t.compiled ? number(t.compile_seconds / t.compiled) : "-"});
    }
    std::cout << shown(table) << all.kernels << " kernels and " << plan.records.size() << " tune records in "
              << cache.disk->folder() << ", " << all.bytes << " bytes; " << number(seconds) << " s with "
              << jobs << " jobs";
    if (all.compiled) std::cout << ", " << number(seconds_per_kernel) << " s for each kernel compiled";
    std::cout << '\n';
  }
  return first_error ? static_cast<int>(first_error->code()) : exit_ok;
}

// ---- --check ----

int check(const PrebuildOptions& options) {
  std::vector<DiskCache> folders = open_cache("", options.cache_path).layers;
  if (const std::string own = options.cache_dir.value_or(DiskCache::default_folder()); !own.empty())
    folders.emplace_back(own, DiskCache::Access::inspect);

  const Plan plan = make_plan(options);
  Json missing = Json::array();
  for (const Wanted& kernel : plan.kernels) {
    if (!find_prebuilt(kernel.spec, kernel.target, kernel.config, folders).empty()) continue;
    missing.push_back({{"target", kernel.target.str()},
                       {"spec", Json::parse(kernel.spec.to_json())},
                       {"config", config_json(kernel.config)}});
    if (!options.json) std::cout << "missing: " << described(kernel) << '\n';
  }
  if (options.json) {
    print_json({{"wanted", plan.kernels.size()}, {"missing", missing}});
  } else {
    std::cout << plan.kernels.size() - missing.size() << " of " << plan.kernels.size()
              << " kernels are there\n";
  }
  return missing.empty() ? exit_ok : static_cast<int>(ErrorCode::cache_failed);
}

}  // namespace

Verb add_prebuild(const Arguments& parent) {
  const Arguments app =
      parent.add_subcommand("prebuild", "Compile every kernel of a manifest into a folder, without a GPU");
  const auto options = std::make_shared<PrebuildOptions>();
  add_manifest(app, options->manifest);
  options->model.add(app);
  app.add_option("--target", options->targets, "sm_90a, sm_80, x86-64-v4, ...; several, or with commas")
      .delimiter(',')
      .required();
  const Argument out = app.add_option("-o,--out", options->out, "The folder; made if it is missing");
  app.add_option("--records", options->records,
                 "Folder with tune records (a cache folder): their configs too, and the records");
  app.add_option("--jobs", options->jobs, "Kernels compiled at once [as many as there are CPUs]")
      .at_least(1)
      .type_name("N");
  const Argument push = app.add_flag(
      "--push", options->push, "Then store them in FLASHJIT_CACHE_REMOTE, signed with FLASHJIT_SIGNING_KEY");
  const Argument check_only =
      app.add_flag("--check", options->check,
                   "Compile nothing; list the kernels that the cache lacks, exit code 7 if there are some");
  out.excludes(check_only);
  push.excludes(check_only);
  add_compile_limits(app, options->limits);
  add_cache_dir(app, options->cache_dir);
  add_cache_path(app, options->cache_path);
  add_output(app, options->json);
  app.footer(
      "Examples:\n"
      "  flashjit prebuild llama-3-8b --target sm_90a --target sm_80 --target x86-64-v4 -o kernels\n"
      "  flashjit prebuild llama-3-8b --use serve --kv-dtype fp8_e4m3 --target sm_90a -o kernels\n"
      "  FLASHJIT_RECORD=asked.json app && flashjit prebuild asked.json --target sm_90a -o kernels\n"
      "  flashjit prebuild manifest.json --target sm_90a --records ~/.cache/flashjit -o kernels --jobs 2\n"
      "  flashjit prebuild manifest.json --target sm_90a --check --cache-path kernels\n\n"
      "FLASHJIT_CACHE_PATH=kernels then serves them, on hosts without a compiler too. A model and a spec\n"
      "without shapes get the kernels of every shape. A model's name alone is its forward.\n");
  return {app, [options] {
            if (options->check) return check(*options);
            if (options->out.empty())
              throw Error(ErrorCode::invalid_argument,
                          "prebuild: give a folder with -o, or --check to compile nothing");
            const int status = prebuild(*options);
            if (!options->push) return status;
            const int pushed = push_cache(DiskCache(options->out), {}, "", options->json);
            return status != exit_ok ? status : pushed;
          }};
}

}  // namespace flashjit::command
