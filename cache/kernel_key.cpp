#include "cache/kernel_key.hpp"

#include <string>

#include "cache/entry_format.hpp"
#include "codegen/digest.hpp"

namespace flashjit {

Key request_key(const AttentionSpec& spec, const KernelSource& source) {
  AttentionSpec unpinned = spec;
  unpinned.config = {};
  std::string config;
  for_each_choice([&](const char* name, auto choice, auto) {
    config += (config.empty() ? "" : " ") + std::string(name) + "=" + choice_text(source.config.*choice);
  });
  Key key;
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

Key entry_key(const Key& request, std::string_view options, std::string_view compiler_identity) {
  Key key = request;
  key.add("options", options);
  key.add("compiler", compiler_identity);
  key.add("format", std::to_string(entry_format_version));
  return key;
}

Key request_of(const Key& entry) {
  Key request;
  for (const KeyField& field : entry.fields()) {
    if (field.label != "options" && field.label != "compiler" && field.label != "format")
      request.add(field.label, field.value);
  }
  return request;
}

}  // namespace flashjit
