#include "runtime/build.hpp"

#include <chrono>
#include <cstdlib>

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

OpenedCache open_cache(const std::optional<std::string>& folder) {
  const std::string name = folder.value_or(DiskCache::default_folder());
  if (name.empty()) return {.disk = std::nullopt, .note = "there is no cache folder"};
  try {
    return {.disk = DiskCache(name), .note = ""};
  } catch (const Error& error) {
    const char* chosen = std::getenv("FLASHJIT_CACHE_DIR");
    if (folder || (chosen && *chosen)) throw;
    return {.disk = std::nullopt, .note = error.message()};
  }
}

BuiltKernel build_kernel(const AttentionSpec& spec, const Target& target, const KernelConfig& config,
                         const OpenedCache& opened) {
  const DiskCache* cache = opened.disk ? &*opened.disk : nullptr;
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
    std::optional<CacheEntry> entry = cache->lookup(key, &info.cache_note);
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
      const std::string note = info.cache_note;
      lock = cache->lock(key);
      find();
      if (!compiled && info.cache_note.empty()) info.cache_note = note;
    }
    if (!compiled) {
      compiled = compiler->compile(source);
      info.origin = Origin::compiled;
      std::string failure;
      if (!cache) {
        info.cache_note = opened.note;
      } else if (cache->publish(pack_kernel(key, *compiled, source), &failure)) {
        info.path = cache->path(key);
      } else {
        info.cache_note = failure;
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
                   const std::optional<std::string>& cache_dir) {
  const AttentionSpec valid = spec.validated();
  const OpenedCache cache = open_cache(cache_dir);
  const KernelConfig config = heuristic_config(valid, target, bucket(shape));
  return build_kernel(valid, target, config, cache).info;
}

}  // namespace flashjit
