// Parsing of untrusted JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "error.hpp"

namespace flashjit {

// Parses the text; messages call it `what`. Throws Error(code) if it is not JSON, gives a
// field twice (the JSON library would accept that) or nests deeper than any JSON of flashjit.
nlohmann::json parse_strict_json(std::string_view text, std::string_view what, ErrorCode code);

}  // namespace flashjit
