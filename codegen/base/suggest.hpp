// Words: the known one that a wrong one probably meant, lists of known ones, texts in quotes.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace flashjit {

// The known word that was probably meant: one of the same meaning, one spelt almost so (insert, delete,
// substitute, swap neighbours), or one that begins so or has a part in common; empty if there is none.
std::string_view closest(std::string_view word, std::span<const std::string_view> known);

// "a, b and c".
std::string listed(std::span<const std::string_view> words);

// The text in double quotes, fit for one line of a message:
// clipped to 48 characters, control characters shown as '?'.
std::string in_quotes(std::string_view text);

// "; did you mean causal?", or nothing if no known word is near.
std::string did_you_mean(std::string_view word, std::span<const std::string_view> known);

// A JSON string of the text, quotes included.
std::string json_string(std::string_view text);

// Whether the text is a name as in C: letters, digits and '_', no digit first.
bool is_identifier(std::string_view text);

}  // namespace flashjit
