#include "cache/kernel_key.hpp"

#include <string>

#include "cache/entry_format.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/spec/spec.hpp"

namespace flashjit {

CacheKey request_key(const AttentionSpec& spec, const KernelSource& source) {
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  std::string config;
  for_each_choice([&](const char* name, auto choice, auto) {
    config += (config.empty() ? "" : " ") + std::string(name) + "=" + choice_text(source.config.*choice);
  });
  CacheKey key;
  key.add("spec", unpinned.to_json());
  key.add("target", source.target.str());
  key.add("config", config);
  std::string steps;
  for (const Step& step : source.steps) {
    if (!steps.empty()) steps += "; ";
    steps += step.function + " threads=" + std::to_string(step.threads) +
             " shared_memory=" + std::to_string(step.shared_memory) +
             " scratch=" + std::to_string(step.scratch);
  }
  key.add("steps", steps);
  key.add("source", digest(source.text));
  for (const EmbeddedHeader& header : source.headers) {
    key.add("header " + std::string(header.name), digest(header.text));
  }
  return key;
}

CacheKey entry_key(const CacheKey& request, std::string_view options, std::string_view compiler_identity) {
  CacheKey key = request;
  key.add("options", options);
  key.add("compiler", compiler_identity);
  key.add("format", std::to_string(entry_format_version));
  return key;
}

CacheKey request_of(const CacheKey& key) {
  CacheKey request;
  for (const CacheKeyField& field : key.fields()) {
    if (field.label != "options" && field.label != "compiler" && field.label != "format")
      request.add(field.label, field.value);
  }
  return request;
}

}  // namespace flashjit
