// The values that a field may have. Each field is declared once with them: fields of masks in mask.hpp, of
// specs in spec.hpp, choices in config.hpp. Refusals follow.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <concepts>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace flashjit {

// first, first + step, ..., last. Without a last one, something else bounds the field.
struct Range {
  int first, last = INT_MAX, step = 1;

  constexpr bool has(int value) const {
    return value >= first && value <= last && (value - first) % step == 0;
  }
  bool operator==(const Range&) const = default;
};

// Throws invalid_spec unless the range has the value. `field` is its name in the message.
void check_value(const std::string& field, int value, const Range& range);
// Throws invalid_spec: the field's value, an enumerator's name, is none of the words.
[[noreturn]] void refuse_word(const std::string& field, const char* value,
                              std::span<const std::string_view> words);

// The names of enumerators.
template <class Values>
std::vector<std::string_view> words_of(const Values& values) {
  std::vector<std::string_view> words;
  for (const auto value : values) words.emplace_back(to_string(value));
  return words;
}

// Throws invalid_spec unless the value is one of the list.
template <class Enum>
  requires std::is_enum_v<Enum>
void check_value(const std::string& field, Enum value, std::span<const Enum> values) {
  if (std::find(values.begin(), values.end(), value) == values.end())
    refuse_word(field, to_string(value), words_of(values));
}

// Visits the fields of a mask, or the like, to refuse values. A number without a range and an enumerator
// without a list do not compile.
struct FieldCheck {
  std::string path;  // before a field's name in messages: "config."

  template <std::same_as<bool> Flag>
  void operator()(const char*, Flag) const {}
  void operator()(const char*, const std::string&) const {}  // a formula: its parser refuses
  template <std::same_as<int> Number>
  void operator()(const char* name, Number value, const Range& range) const {
    check_value(path + name, value, range);
  }
  template <class Enum, std::size_t n>
  void operator()(const char* name, Enum value, const std::array<Enum, n>& values) const {
    check_value(path + name, value, std::span<const Enum>(values));
  }
};

}  // namespace flashjit
