#include "cache/kernel_entry.hpp"

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "codegen/error.hpp"

namespace flashjit {
namespace {

using nlohmann::json;

// A field of metadata that nobody vouches for. Throws json::exception or Error where it is not what
// pack_kernel writes.
int count(const json& object, const char* name) {
  const json& value = object.at(name);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::numeric_limits<int>::max()) {
    throw Error(ErrorCode::cache_failed, std::string("metadata: ") + name + " is not a count");
  }
  return value.get<int>();
}

void read(const json& object, const char* name, int& out) {
  out = count(object, name);
}
void read(const json& object, const char* name, bool& out) {
  out = object.at(name).get<bool>();
}
void read(const json& object, const char* name, TileOrder& out) {
  for (const TileOrder order : {TileOrder::heads, TileOrder::pairs, TileOrder::longest_first}) {
    if (object.at(name) == to_string(order)) return void(out = order);
  }
  throw Error(ErrorCode::cache_failed, std::string("metadata: ") + name + " is not an order");
}

std::string text(const json& object, const char* name) {
  return object.at(name).get<std::string>();
}

}  // namespace

CacheEntry pack_kernel(const Key& key, const CompiledKernel& compiled, const KernelSource& source) {
  json steps = json::array();
  for (const Step& step : source.steps) {
    steps.push_back({{"entry", step.entry},
                     {"threads", step.threads},
                     {"shared_memory", step.shared_memory},
                     {"scratch", step.scratch}});
  }
  const json metadata = {{"target", source.target.str()},
                         {"config", json::parse(to_json(source.config))},
                         {"steps", steps},
                         {"compiler", compiled.compiler},
                         {"registers", compiled.registers},
                         {"spill_bytes", compiled.spill_bytes},
                         {"static_shared_memory", compiled.static_shared_memory},
                         {"compile_ms", compiled.compile_ms},
                         {"log", compiled.log}};
  // A log may quote bytes that are not UTF-8.
  return {key, metadata.dump(-1, ' ', false, json::error_handler_t::replace), compiled.code};
}

std::optional<StoredKernel> unpack_kernel(CacheEntry entry) try {
  const json metadata = json::parse(entry.metadata);
  StoredKernel kernel;
  kernel.target = Target::parse(text(metadata, "target"));
  const json& config = metadata.at("config");
  for_each_choice([&](const char* name, auto choice, auto) { read(config, name, kernel.config.*choice); });
  for (const json& step : metadata.at("steps").get_ref<const json::array_t&>()) {
    kernel.steps.push_back(
        {text(step, "entry"), count(step, "threads"), count(step, "shared_memory"), count(step, "scratch")});
  }
  kernel.compiled.compiler = text(metadata, "compiler");
  kernel.compiled.registers = count(metadata, "registers");
  kernel.compiled.spill_bytes = count(metadata, "spill_bytes");
  kernel.compiled.static_shared_memory = count(metadata, "static_shared_memory");
  kernel.compiled.compile_ms = metadata.at("compile_ms").get<double>();
  kernel.compiled.log = text(metadata, "log");
  kernel.compiled.code = std::move(entry.payload);
  if (kernel.steps.empty() || kernel.compiled.code.empty()) return std::nullopt;
  return kernel;
} catch (const json::exception&) {
  return std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

}  // namespace flashjit
