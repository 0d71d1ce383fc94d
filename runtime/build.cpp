#include "runtime/build.hpp"

#include <chrono>

#include "cache/kernel_entry.hpp"
#include "cache/kernel_key.hpp"
#include "codegen/render.hpp"
#include "codegen/search_space.hpp"
#include "runtime/compiler.hpp"

namespace flashjit {
namespace {

double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::optional<DiskCache> open_cache(const std::optional<std::string>& folder) {
  const std::string name = folder.value_or(DiskCache::default_folder());
  if (name.empty()) return std::nullopt;
  return DiskCache(name);
}

BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const DiskCache* cache) {
  const auto start = std::chrono::steady_clock::now();
  const KernelSource source = render(spec, target, config);
  const std::shared_ptr<const Compiler> compiler = compiler_for(target);
  const Key key = entry_key(request_key(spec, source), compiler->options(source), compiler->identity());

  BuiltKernel built;
  KernelInfo& info = built.info;
  info.spec = spec;
  info.target = target;
  info.config = config;
  info.key = key.digest();
  built.steps = source.steps;

  std::optional<CompiledKernel> compiled;
  const auto find = [&] {
    if (!cache) return;
    std::optional<CacheEntry> entry = cache->lookup(key);
    if (!entry) return;
    std::optional<StoredKernel> stored = unpack_kernel(std::move(*entry));
    if (!stored) return;
    compiled = std::move(stored->compiled);
    info.origin = Origin::disk;
    info.path = cache->path(key);
  };
  find();
  if (!compiled) {
    KeyLock lock;
    if (cache) {
      lock = cache->lock(key);
      find();
    }
    if (!compiled) {
      compiled = compiler->compile(source);
      info.origin = Origin::compiled;
      if (!cache) {
        info.not_cached = "no cache folder was given";
      } else if (cache->publish(pack_kernel(key, *compiled, source), &info.not_cached)) {
        info.path = cache->path(key);
      }
    }
  }
  info.compiler = compiled->compiler;
  info.log = compiled->log;
  info.registers = compiled->registers;
  info.spill_bytes = compiled->spill_bytes;
  info.shared_memory = compiled->static_shared_memory;
  if (!built.steps.empty()) info.shared_memory += built.steps.front().shared_memory;
  info.compile_ms = compiled->compile_ms;
  info.get_ms = milliseconds_since(start);
  built.code = std::move(compiled->code);
  return built;
}

KernelInfo compile(const AttentionSpec& spec, const Target& target, const Shape& shape,
                   std::optional<std::string> cache_dir) {
  const AttentionSpec valid = spec.validated();
  const std::optional<DiskCache> cache = open_cache(cache_dir);
  const KernelConfig config = heuristic_config(valid, target, bucket(shape));
  return build_kernel(valid, target, config, cache ? &*cache : nullptr).info;
}

}  // namespace flashjit
