// A config in JSON that nobody vouches for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "codegen/config.hpp"

namespace flashjit {

// Every choice, as to_json(KernelConfig) writes it; further fields are ignored. Throws json::exception or
// Error where one is missing or of the wrong type.
KernelConfig config_from_json(const nlohmann::json& json);
// A whole number of at least 0 that an int holds; throws likewise.
int count_from_json(const nlohmann::json& json, const char* name);
// A string; throws likewise.
std::string text_from_json(const nlohmann::json& json, const char* name);

}  // namespace flashjit
