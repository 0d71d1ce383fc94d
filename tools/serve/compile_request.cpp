#include "tools/serve/compile_request.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>

#include "cache/config_json.hpp"
#include "cache/kernel_key.hpp"
#include "cache/signature.hpp"
#include "codegen/base/digest.hpp"
#include "codegen/base/float_state.hpp"
#include "codegen/base/strict_json.hpp"
#include "codegen/base/suggest.hpp"
#include "codegen/families/kernel_family.hpp"
#include "codegen/families/search_space.hpp"
#include "codegen/render.hpp"
#include "runtime/flashjit.hpp"

namespace flashjit::serve {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 5> fields = {"version", "spec", "target", "config", "request"};

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::invalid_argument,
              "a request for a kernel " + why +
                  R"(; {"version": "0.1.0", "spec": {...}, "target": "sm_90a", "config": {...}} would do)");
}

const std::string& text_of(const json& request, const char* name) {
  const auto found = request.find(name);
  if (found == request.end() || !found->is_string()) refuse(std::string("has no text \"") + name + '"');
  return found->get_ref<const std::string&>();
}

KernelConfig config_of(const json& request) {
  const auto found = request.find("config");
  if (found == request.end() || !found->is_object()) refuse("has no object \"config\"");
  try {
    return config_from_json(*found);
  } catch (const json::exception& error) {
    refuse(std::string("has a config that lacks a choice: ") + error.what());
  } catch (const Error& error) {
    refuse("has a config that is wrong: " + error.message());
  }
}

}  // namespace

CompileRequest parse_compile_request(std::string_view text) {
  const DefaultFloatState state;
  const json request =
      parse_strict_json(text, "a request for a kernel", ErrorCode::invalid_argument, most_request_bytes);
  if (!request.is_object()) refuse("is no object");
  for (const auto& [name, value] : request.items())
    if (std::find(fields.begin(), fields.end(), name) == fields.end())
      refuse("has a field " + in_quotes(name) + did_you_mean(name, fields));
  const std::string& asker = text_of(request, "version");
  const auto spec = request.find("spec");
  if (spec == request.end() || !spec->is_object()) refuse("has no object \"spec\"");
  const auto explain = [&](const Error& error) -> Error {
    if (asker == version()) return error;
    return {error.code(),
            error.message() + "; the asker is flashjit " + in_quotes(asker) + ", this is " + version(),
            error.detail()};
  };
  try {
    CompileRequest parsed{AttentionSpec::from_json(spec->dump()), {}, {}};
    const Target target = Target::parse(text_of(request, "target"));
    const KernelConfig config = config_of(request);
    AttentionSpec pins = parsed.spec;
    pins.config = pinned(config);
    AttentionSpec::from_json(pins.to_json());  // refuses numbers that no config has
    // A size of 0 is no pin: it says that the kernel has no such choice.
    for_each_choice([&](const char* name, auto choice, auto) {
      if constexpr (std::is_same_v<decltype(choice), int KernelConfig::*>) {
        if (config.*choice == 0 && family_of(parsed.spec.op, target).has_choice(name))
          refuse(std::string("has a config without ") + name);
      }
    });
    if (const std::string why = misfit(parsed.spec, target, config); !why.empty())
      throw Error(ErrorCode::invalid_spec, "the config does not fit: " + why);
    parsed.source = render(parsed.spec, target, config);
    parsed.key = request_key(parsed.spec, parsed.source);
    const bool names_key = request.contains("request");
    if (names_key && !is_hex(text_of(request, "request"), digest_size))
      refuse("has no digest as \"request\"");
    if (names_key ? text_of(request, "request") != parsed.key.digest() : asker != version())
      throw Error(ErrorCode::not_prebuilt, "this service makes another kernel of this spec than the asker");
    return parsed;
  } catch (const Error& error) {
    throw explain(error);
  }
}

}  // namespace flashjit::serve
