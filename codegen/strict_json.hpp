// JSON that nobody vouches for.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "error.hpp"

namespace flashjit {

// Throws Error(code) where the text, called `what` in messages, is not JSON, gives a field twice (which the
// JSON library would let pass) or nests deeper than anything of ours.
nlohmann::json parse_strict_json(std::string_view text, std::string_view what, ErrorCode code);

}  // namespace flashjit
