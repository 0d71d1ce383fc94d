// flashjit cache explain: shows a key's fields, and why a kernel is not found.
#include <algorithm>
#include <iostream>
#include <memory>

#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/compiler.hpp"
#include "tools/command/cache.hpp"
#include "tools/command/exit_code.hpp"
#include "tools/command/options.hpp"

namespace flashjit::command {
namespace {

struct CacheExplainOptions {
  std::vector<std::string> keys;
  std::string spec, target = "native";
  ShapeOptions shape;
};

using Listings = std::vector<DiskCache::Listing>;

Listings list_all(const CacheOptions& cache) {
  Listings all;
  for (const DiskCache& folder : cache.folders()) {
    for (DiskCache::Listing& item : folder.list(false)) all.push_back(std::move(item));
  }
  return all;
}

// The only entry whose digest starts with the prefix. Throws if there is none, or if there are several.
CacheKey find_key(const Listings& list, const std::string& prefix) {
  std::optional<CacheKey> found;
  for (const DiskCache::Listing& item : list) {
    if (!item.entry || !item.entry->key.digest().starts_with(prefix)) continue;
    if (found && *found != item.entry->key)
      throw Error(ErrorCode::invalid_argument,
                  "several entries start with '" + prefix + "': give more digits");
    found = item.entry->key;
  }
  if (!found) {
    throw Error(ErrorCode::invalid_argument,
                "no entry starts with '" + prefix + "'; 'flashjit cache ls' lists them");
  }
  return *found;
}

// The key that an engine would look up for the spec now. Without a compiler only its request is known.
CacheKey wanted_key(const CacheExplainOptions& options) {
  const AttentionSpec spec = read_spec(options.spec);
  const Target target = Target::parse(options.target);
  const KernelSource source =
      render(spec, target, heuristic_config(spec, target, bucket(options.shape.shape(spec))));
  const CacheKey request = request_key(spec, source);
  try {
    const std::shared_ptr<const Compiler> compiler = compiler_for(target);
    return entry_key(request, compiler->options(source), compiler->identity());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::compiler_unavailable) throw;
    return request;
  }
}

std::size_t fields_in_common(const CacheKey& a, const CacheKey& b) {
  return std::count_if(a.fields().begin(), a.fields().end(), [&](const CacheKeyField& f) {
    const std::string* other = b.find(f.label);
    return other && *other == f.value;
  });
}

// The entry that build_kernel() would use for that key: first a layer's entry of the same request, then the
// folder's entry of the same key (without a compiler, of the same request).
std::optional<std::string> find_entry(const CacheOptions& cache, const CacheKey& wanted) {
  const CacheKey request = request_of(wanted);
  for (const DiskCache& folder : cache.folders()) {
    const bool by_request = folder.access() == DiskCache::Access::read_only || wanted == request;
    std::optional<StoredKernel> kernel;
    const EntryUse use = unpack_into(kernel);
    const auto entry =
        by_request ? folder.lookup_request(request, nullptr, use) : folder.lookup(wanted, nullptr, use);
    if (entry) return folder.path(entry->key);
  }
  return std::nullopt;
}

int explain(const CacheOptions& cache, const CacheExplainOptions& options) {
  const Listings list = list_all(cache);
  const CacheKey key = options.spec.empty() ? find_key(list, options.keys.front()) : wanted_key(options);
  std::optional<CacheKey> other;
  std::optional<std::string> hit;
  if (options.spec.empty()) {
    if (options.keys.size() > 1) other = find_key(list, options.keys[1]);
  } else {
    hit = find_entry(cache, key);
    std::size_t most = 0;
    for (const DiskCache::Listing& item : list) {
      if (!item.entry) continue;
      const std::size_t common = fields_in_common(key, item.entry->key);
      if (common <= most) continue;
      most = common;
      other = item.entry->key;
    }
  }
  const std::string difference = other ? explain_difference(key, *other) : "";
  if (cache.json) {
    Json json = {
        {"key", key.digest()}, {"fields", fields_json(key)}, {"other", nullptr}, {"difference", difference}};
    if (other) json["other"] = other->digest();
    if (!options.spec.empty()) json["found"] = hit.has_value();
    if (hit) json["path"] = *hit;
    print_json(json);
    return exit_ok;
  }
  std::cout << key.digest() << '\n';
  for (const CacheKeyField& f : key.fields()) std::cout << "  " << f.label << ": " << f.value << '\n';
  if (hit) {
    std::cout << "is in the cache: " << *hit << '\n';
  } else if (other) {
    std::cout << (options.spec.empty() ? "differs from " : "is not in the cache; the closest entry is ")
              << other->digest() << (options.spec.empty() ? " in\n" : ", which differs in\n") << difference
              << (difference.empty() || difference.ends_with('\n') ? "" : "\n");
  } else if (!options.spec.empty()) {
    std::cout << "is not in the cache, nor is anything like it\n";
  }
  return exit_ok;
}

}  // namespace

CacheAction add_explain(const Arguments& app) {
  const auto options = std::make_shared<CacheExplainOptions>();
  const Argument keys =
      app.add_option("KEY", options->keys, "One or two entries: digests or their first digits")
          .expected(1, 2);
  const Argument spec =
      app.add_option("--spec", options->spec,
                     "Show the key that an engine looks up for this spec, and whether the cache has it");
  keys.excludes(spec);
  app.add_option("--target", options->target, "Target for --spec").needs(spec).capture_default_str();
  options->shape.add(app);
  app.footer(
      "Examples:\n"
      "  flashjit cache explain 3f2a\n"
      "  flashjit cache explain 3f2a 9b41\n"
      "  flashjit cache explain --spec spec.json --target sm_90 --seqlen-q 4096\n");
  return [options](const CacheOptions& cache) {
    if (options->keys.empty() && options->spec.empty())
      throw Error(ErrorCode::invalid_argument, "cache explain: give one or two keys, or --spec");
    return explain(cache, *options);
  };
}

}  // namespace flashjit::command
