#include "runtime/build.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <sstream>
#include <utility>

#include "cache/environment.hpp"
#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/arguments/checks.hpp"
#include "runtime/compile_watch.hpp"
#include "runtime/compiler.hpp"
#include "runtime/executable.hpp"
#include "runtime/remote/plugin_client.hpp"
#include "runtime/remote/remote_client.hpp"

namespace flashjit {
namespace {

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

// The entry that has most in common with the request, and of the same spec and target.
struct Nearest {
  std::string path, difference;  // explain_difference()
  bool same_config = false;
};
std::optional<Nearest> nearest_entry(const CacheKey& request, const OpenedCache& cache) {
  std::optional<Nearest> nearest;
  std::size_t fewest = 0;
  const auto look = [&](const DiskCache& folder) {
    for (const DiskCache::Listing& item : folder.list(false)) {
      if (!item.entry) continue;
      const CacheKey other = request_of(item.entry->key);
      const auto same = [&](const char* field) { return *other.find(field) == *request.find(field); };
      if (!other.find("spec") || !other.find("target") || !other.find("config") || !same("spec") ||
          !same("target"))
        continue;
      std::string difference = explain_difference(request, other);
      if (difference.empty()) continue;  // it is the kernel, and `note` says why it is not used
      const auto lines = static_cast<std::size_t>(std::count(difference.begin(), difference.end(), '\n'));
      // Another config is another kernel, however few fields differ.
      const std::size_t far = lines + (same("config") ? 0 : 1000);
      if (nearest && far >= fewest) continue;
      fewest = far;
      nearest = Nearest{item.path, std::move(difference), same("config")};
    }
  };
  for (const DiskCache& layer : cache.layers) look(layer);
  if (cache.disk) look(*cache.disk);
  return nearest;
}

// The labels of explain_difference(): "config, header cpu/forward.h and 3 more".
std::string fields_of(const std::string& difference) {
  constexpr std::size_t most = 3;
  std::vector<std::string> labels;
  std::istringstream lines(difference);
  for (std::string line; std::getline(lines, line);) labels.push_back(line.substr(0, line.find(": ")));
  std::string text;
  for (std::size_t i = 0; i < std::min(labels.size(), most); ++i) text += (i == 0 ? "" : ", ") + labels[i];
  if (labels.size() > most) text += " and " + std::to_string(labels.size() - most) + " more";
  return text;
}

[[noreturn]] void refuse_to_compile(AttentionSpec spec, const KernelSource& source, const CacheKey& request,
                                    const OpenedCache& cache, const std::string& note) {
  const Target& target = source.target;
  std::string folders, folder;
  for (const DiskCache& layer : cache.layers) folders += layer.folder() + ", ";
  if (cache.disk) folders += cache.disk->folder() + ", ";
  if (!folders.empty()) folder = folders.substr(0, folders.find(", "));
  if (cache.remote) {
    for (const RemoteAddress& store : cache.remote->stores()) folders += store.url + ", ";
  }
  // Without pins prebuild makes the configs of every shape, unless a record chose yet another one.
  const std::vector<KernelConfig> usual = heuristic_configs(spec, target);
  if (std::find(usual.begin(), usual.end(), source.config) == usual.end())
    spec.config = pinned(source.config);
  std::string closest;
  const std::optional<Nearest> nearest = nearest_entry(request, cache);
  if (nearest)
    closest =
        nearest->same_config
            ? "; " + nearest->path + " is of another version of flashjit: it differs in " +
                  fields_of(nearest->difference)
            : "; the closest is " + nearest->path + ", which differs in " + fields_of(nearest->difference);
  throw Error(ErrorCode::not_prebuilt,
              "no cache folder has the kernel of " + spec.to_json() + " for " + target.str() +
                  (note.empty() ? "" : " (" + note + ")") + closest +
                  ", and the policy require_prebuilt neither compiles nor tunes (searched: " +
                  (folders.empty() ? "none, " : folders) + "see FLASHJIT_CACHE_PATH); where there is a " +
                  "compiler, this makes it: flashjit prebuild '" + spec.to_json() + "' --target " +
                  target.str() + " -o " + (folder.empty() ? "FOLDER" : folder),
              nearest ? nearest->difference : "");
}

void add_steps(KernelInfo& info, const std::vector<Step>& steps, const std::vector<CompiledStep>& compiled) {
  for (const Step& step : steps) {
    StepInfo added{.function = step.function, .shared_memory = step.shared_memory};
    for (const CompiledStep& found : compiled) {
      if (found.function != step.function) continue;
      added.registers = found.registers;
      added.spill_bytes = found.spill_bytes;
      added.shared_memory += found.static_shared_memory;
    }
    info.registers = std::max(info.registers, added.registers);
    info.spill_bytes = std::max(info.spill_bytes, added.spill_bytes);
    info.shared_memory = std::max(info.shared_memory, added.shared_memory);
    info.steps.push_back(std::move(added));
  }
}

}  // namespace

std::vector<std::string> layer_paths(const std::optional<std::string>& layers) {
  std::vector<std::string> paths;
  std::istringstream text(layers.value_or(DiskCache::default_layers()));
  for (std::string path; std::getline(text, path, ':');) {
    if (!path.empty()) paths.push_back(path);
  }
  return paths;
}

OpenedCache open_cache(const std::optional<std::string>& folder, const std::optional<std::string>& layers,
                       std::uint64_t max_bytes, const StoreOptions& stores) {
  OpenedCache cache;
  cache.verifier = verifier(trusted_keys(stores.trust));
  const std::string key_path = signing_key_path(stores.signing_key);
  cache.signer = signer(key_path);
  for (const std::string& path : layer_paths(layers))
    cache.layers.emplace_back(path, DiskCache::Access::read_only).use_signatures(cache.verifier, {});
  if (max_bytes == 0) max_bytes = DiskCache::default_max_bytes();
  const std::string name = folder.value_or(DiskCache::default_folder());
  const auto open_remote = [&] {
    const std::string keys = stores.trust.value_or(environment_variable(Variable::trust)) + "\n" + key_path;
    cache.remote = remote_cache(stores.remote, cache.verifier, cache.signer, keys,
                                cache.disk ? cache.disk->folder() : std::string());
  };
  if (name.empty()) {
    cache.note = "there is no cache folder";
    open_remote();
    return cache;
  }
  try {
    cache.disk.emplace(name, DiskCache::Access::read_write, max_bytes)
        .use_signatures(cache.verifier, cache.signer);
  } catch (const Error& error) {
    if (folder || !environment_variable(Variable::cache_dir).empty()) throw;
    cache.note = error.message();
  }
  open_remote();
  return cache;
}

StoreOptions store_options(const EngineOptions& options) {
  return {options.cache_remote, options.cache_trust, options.signing_key};
}

BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const OpenedCache& cache, bool may_compile, const CodeLoader& load,
                         const CompileLimits& limits, const std::function<void()>& on_wait) {
  const auto start = std::chrono::steady_clock::now();
  const KernelSource source = render(spec, target, config);
  const CacheKey request = request_key(spec, source);

  BuiltKernel built;
  KernelInfo& info = built.info;
  info.spec = spec;
  info.target = target;
  info.config = config;
  const auto note = [&](const std::string& why) {
    if (why.empty() || info.cache_note.find(why) != std::string::npos) return;
    info.cache_note += (info.cache_note.empty() ? "" : "; ") + why;
  };

  CompileWatch watch(limits);
  bool waits = false;
  // While another process or host makes the kernel.
  const auto goes_on = [&] {
    if (on_wait && !std::exchange(waits, true)) on_wait();
    return !watch.is_cancelled();
  };
  std::shared_ptr<const Compiler> compiler;
  std::optional<CompiledKernel> compiled;
  const auto use = [&](CacheEntry& entry, Origin origin, const std::string& path) -> Finding {
    std::optional<StoredKernel> stored;
    if (Finding finding = unpack_into(stored)(entry); !finding.reason.empty()) return finding;
    try {
      if (load) load(stored->compiled.code, source.steps);
    } catch (const BadCode& error) {
      return {error.message(), compiler != nullptr};
    }
    compiled = std::move(stored->compiled);
    if (const std::string* identity = entry.key.find("compiler")) built.compiler_identity = *identity;
    info.origin = origin;
    info.cache_key = entry.key.digest();
    info.path = path;
    return {};
  };
  const auto find_request = [&](const DiskCache& folder) {
    if (compiled) return;
    std::string why;
    folder.lookup_request(
        request, &why, [&](CacheEntry& entry) { return use(entry, Origin::disk, folder.path(entry.key)); });
    note(why);
  };
  // Takes what a store gave, whose signature was checked, and keeps it in the writable folder. `expected`
  // says whether the key is the one that was asked for.
  const auto take = [&](RemoteCache::Got got, const auto& expected) {
    if (got.answer != Answer::yes) return;
    CacheEntry entry;
    std::string why = decode_entry(got.bytes, entry);
    if (why.empty() && !expected(entry.key)) why = "holds another key";
    if (why.empty()) why = use(entry, Origin::remote, {}).reason;
    if (!why.empty()) return note("an entry of a remote store cannot be used: " + why);
    if (!cache.disk)
      note(cache.note);
    else if (cache.disk->publish_bytes(entry.key, std::move(got.bytes), Flush::no, &why))
      info.path = cache.disk->path(entry.key);
    else
      note(why);
  };
  const auto has_request = [&](const CacheKey& key) { return request_of(key) == request; };
  const auto find_request_remotely = [&] {
    if (!cache.remote || compiled) return;
    const auto name_of = [&](const std::string& entry) { return DiskCache::name(request.digest(), entry); };
    take(cache.remote->get_request(DiskCache::request_name(request), name_of, note), has_request);
  };

  // Has a store that compiles make the kernel. Any compiler's counts, as in a layer.
  const auto make_remotely = [&](bool patient) {
    const auto name_of = [](const std::string& bytes) {
      CacheEntry entry;
      return decode_entry(bytes, entry).empty() ? DiskCache::name(entry.key) : std::string();
    };
    return cache.remote->make(DiskCache::request_name(request),
                              compile_request_text(spec, target, config, request.digest()), name_of, patient,
                              note, goes_on);
  };
  for (const DiskCache& layer : cache.layers) find_request(layer);
  if (!may_compile) {
    if (cache.disk) find_request(*cache.disk);
    find_request_remotely();
    if (!compiled) refuse_to_compile(spec, source, request, cache, info.cache_note);
  }
  if (!compiled) {
    try {
      compiler = compiler_for(target);
    } catch (const Error& error) {
      if (cache.disk) find_request(*cache.disk);
      find_request_remotely();
      if (!compiled && cache.remote) {
        take(make_remotely(true).got, has_request);
        watch.check("the kernel for " + target.str());
      }
      if (!compiled) {
        if (info.cache_note.empty()) throw;
        throw Error(error.code(), error.message() + "; in the cache, " + info.cache_note, error.detail());
      }
    }
  }
  if (!compiled) {
    const CacheKey key = entry_key(request, compiler->options(source), compiler->identity());
    info.cache_key = key.digest();
    std::string why;
    const auto find_key = [&] {
      if (!cache.disk || compiled) return;
      cache.disk->lookup(key, &why,
                         [&](CacheEntry& entry) { return use(entry, Origin::disk, cache.disk->path(key)); });
      note(why);
    };
    find_key();
    KeyLock lock;
    RemoteCache::Lease lease;
    if (!compiled && cache.disk) {
      lock = cache.disk->lock(key, std::chrono::minutes(1), &why, [&] { return !goes_on(); });
      watch.check("the kernel for " + target.str());
      note(why);
      find_key();
    }
    if (!compiled && cache.remote) {
      bool is_made = false;
      RemoteCache::Fetched fetched =
          cache.remote->fetch(DiskCache::name(key), cache.remote->fetch_limits(), note, goes_on, {}, [&] {
            RemoteCache::Made made = make_remotely(false);
            is_made = made.asked;
            return made;
          });
      watch.check("the kernel for " + target.str());
      lease = std::move(fetched.lease);
      // A store that compiles may have another compiler.
      take(std::move(fetched.got),
           [&](const CacheKey& other) { return is_made ? has_request(other) : other == key; });
    }
    if (!compiled) {
      compiled = compiler->compile(source, false, limits);
      built.compiler_identity = compiler->identity();
      info.origin = Origin::compiled;
      const CacheEntry entry = pack_kernel(key, *compiled, source);
      if (!cache.disk) {
        note(cache.note);
      } else if (cache.disk->publish(entry, &why)) {
        info.path = cache.disk->path(key);
      } else {
        note(why);
      }
      if (cache.remote && cache.remote->may_store(DiskCache::name(key))) {
        if (std::optional<std::string> bytes = encode_entry(entry, why))
          cache.remote->put(DiskCache::name(key), std::move(*bytes));
        cache.remote->put_pointer(DiskCache::request_name(request), key.digest());
      }
      if (load) load(compiled->code, source.steps);
    }
  }
  info.compiler = compiled->compiler;
  info.log = compiled->log;
  add_steps(info, source.steps, compiled->steps);
  info.compile_ms = compiled->compile_ms;
  info.get_ms = milliseconds_since(start);
  return built;
}

std::string find_prebuilt(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                          const std::vector<DiskCache>& folders) {
  if (folders.empty()) return {};
  const CacheKey request = request_key(spec, render(spec, target, config));
  for (const DiskCache& folder : folders) {
    std::optional<StoredKernel> kernel;
    if (const auto entry = folder.lookup_request(request, nullptr, unpack_into(kernel)))
      return folder.path(entry->key);
  }
  return {};
}

std::string compile_request_text(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                                 const std::string& request_digest) {
  return std::string("{\"version\": ") + json_string(version()) + ", \"spec\": " + spec.to_json() +
         ", \"target\": " + json_string(target.str()) + ", \"config\": " + to_json(config) +
         ", \"request\": " + json_string(request_digest) + "}";
}

Answer stored_remotely(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                       RemoteCache& remote, std::string& why) {
  return remote.exists(DiskCache::request_name(request_key(spec, render(spec, target, config))), why);
}

KernelInfo compile(const AttentionSpec& spec, const Target& target, const Shape& shape,
                   const std::optional<std::string>& cache_dir, const std::optional<std::string>& cache_path,
                   const CompileLimits& limits) {
  const DefaultFloatState state;
  check_shape(spec, shape);
  check_limits(limits, target);
  const AttentionSpec valid = spec.validated();
  const OpenedCache cache = open_cache(cache_dir, cache_path);
  const KernelConfig config = heuristic_config(valid, target, bucket(shape));
  return build_kernel(valid, target, config, cache, true, {}, limits).info;
}

}  // namespace flashjit
