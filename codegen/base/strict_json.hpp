// Parsing of untrusted JSON.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>

#include "codegen/base/error.hpp"

namespace flashjit {

inline constexpr std::size_t most_json_bytes = 4u << 20;  // of a manifest, a request, a tune record

// Parses the text, in time linear in its size; messages call it `what`. Throws Error(code) if it has more
// than `most_bytes` bytes, is not JSON, gives a field twice (the JSON library would accept that) or nests
// deeper than any JSON of flashjit.
nlohmann::json parse_strict_json(std::string_view text, std::string_view what, ErrorCode code,
                                 std::size_t most_bytes = most_json_bytes);

}  // namespace flashjit
