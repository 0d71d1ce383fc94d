// Help for messages: the known word that a wrong word probably meant, and lists of known words.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace flashjit {

// The known word with the least edit distance (insert, delete, substitute,
// swap neighbours); empty if none is near. `known` must not be empty.
std::string_view closest(std::string_view word, std::span<const std::string_view> known);

// "a, b and c".
std::string listed(std::span<const std::string_view> words);

// The text in double quotes, fit for one line of a message:
// clipped to 48 characters, control characters shown as '?'.
std::string in_quotes(std::string_view text);

}  // namespace flashjit
