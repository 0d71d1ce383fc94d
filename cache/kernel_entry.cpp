#include "cache/kernel_entry.hpp"

#include <nlohmann/json.hpp>
#include <string>

#include "cache/config_json.hpp"
#include "codegen/base/error.hpp"

namespace flashjit {
using nlohmann::json;

CacheEntry pack_kernel(const CacheKey& key, const CompiledKernel& compiled, const KernelSource& source) {
  json steps = json::array();
  for (const Step& step : source.steps) {
    steps.push_back({{"entry", step.function},
                     {"threads", step.threads},
                     {"shared_memory", step.shared_memory},
                     {"scratch", step.scratch}});
  }
  json compiled_steps = json::array();
  for (const CompiledStep& step : compiled.steps) {
    compiled_steps.push_back({{"entry", step.function},
                              {"registers", step.registers},
                              {"spill_bytes", step.spill_bytes},
                              {"static_shared_memory", step.static_shared_memory}});
  }
  const json metadata = {{"target", source.target.str()},
                         {"config", json::parse(to_json(source.config))},
                         {"steps", steps},
                         {"compiler", compiled.compiler},
                         {"compiled_steps", compiled_steps},
                         {"compile_ms", compiled.compile_ms},
                         {"log", compiled.log}};
  // A log may quote bytes that are not UTF-8.
  return {key, metadata.dump(-1, ' ', false, json::error_handler_t::replace), compiled.code};
}

std::optional<StoredKernel> unpack_kernel(CacheEntry entry) try {
  const json metadata = json::parse(entry.metadata);
  StoredKernel kernel;
  kernel.target = Target::parse(text_from_json(metadata, "target"));
  kernel.config = config_from_json(metadata.at("config"));
  for (const json& step : metadata.at("steps").get_ref<const json::array_t&>()) {
    kernel.steps.push_back({text_from_json(step, "entry"), count_from_json(step, "threads"),
                            count_from_json(step, "shared_memory"), count_from_json(step, "scratch")});
  }
  kernel.compiled.compiler = text_from_json(metadata, "compiler");
  for (const json& step : metadata.at("compiled_steps").get_ref<const json::array_t&>()) {
    kernel.compiled.steps.push_back({text_from_json(step, "entry"), count_from_json(step, "registers"),
                                     count_from_json(step, "spill_bytes"),
                                     count_from_json(step, "static_shared_memory")});
  }
  kernel.compiled.compile_ms = metadata.at("compile_ms").get<double>();
  kernel.compiled.log = text_from_json(metadata, "log");
  kernel.compiled.code = std::move(entry.payload);
  if (kernel.steps.empty() || kernel.compiled.code.empty()) return std::nullopt;
  return kernel;
} catch (const json::exception&) {
  return std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

EntryUse unpack_into(std::optional<StoredKernel>& kernel) {
  return [&kernel](CacheEntry& entry) -> Finding {
    kernel = unpack_kernel({CacheKey(), std::move(entry.metadata), std::move(entry.payload)});
    if (kernel) return {};
    return {"its metadata does not describe a kernel", true};
  };
}

}  // namespace flashjit
