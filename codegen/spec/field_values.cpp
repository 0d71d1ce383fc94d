#include "codegen/spec/field_values.hpp"

#include "codegen/base/suggest.hpp"
#include "codegen/spec/mask_rules.hpp"

namespace flashjit {

void check_value(const std::string& field, int value, const Range& range) {
  if (range.has(value)) return;
  const auto number = [](long long n) { return std::to_string(n); };
  const int inside = std::clamp(value, range.first, range.last);
  const int below = range.first + (inside - range.first) / range.step * range.step;
  const bool between = value > range.first && value < range.last;
  std::string rule = inside != below ? "a multiple of " + number(range.step) + " " : "";
  rule += range.last == INT_MAX ? "from " + number(range.first) + " on"
                                : "between " + number(range.first) + " and " + number(range.last);
  invalid(field + " " + number(value) + " is not " + rule + "; " + number(below) +
          (between ? " or " + number(0LL + below + range.step) : "") + " would work");
}

void refuse_word(const std::string& field, const char* value, std::span<const std::string_view> words) {
  invalid(field + " " + value + " is not one of " + listed(words) + "; " + std::string(words.front()) +
          " would work");
}

}  // namespace flashjit
