// Reads a config from untrusted JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "codegen/spec/config.hpp"

namespace flashjit {

// Reads every choice, as to_json(KernelConfig) writes it; ignores further fields.
// Throws json::exception or Error if a choice is missing or has the wrong type.
KernelConfig config_from_json(const nlohmann::json& json);
// Reads a non-negative whole number that fits an int; throws likewise.
int count_from_json(const nlohmann::json& json, const char* name);
// Reads a string; throws likewise.
std::string text_from_json(const nlohmann::json& json, const char* name);

}  // namespace flashjit
