#include "tools/verify/table.hpp"

#include <algorithm>
#include <cstdio>

namespace flashjit::verify {
namespace {

// The number of characters, not bytes, of a UTF-8 text.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

bool is_number(const std::string& text) {
  return !text.empty() && (text[0] == '-' || (text[0] >= '0' && text[0] <= '9'));
}

}  // namespace

std::string Table::str(std::size_t most) const {
  const std::size_t columns = rows_[0].size();
  std::vector<std::size_t> widths(columns, 0);
  std::vector<bool> numeric(columns, rows_.size() > 1);
  for (std::size_t r = 0; r < rows_.size(); ++r) {
    for (std::size_t c = 0; c < columns && c < rows_[r].size(); ++c) {
      widths[c] = std::max(widths[c], width(rows_[r][c]));
      if (r > 0 && !is_number(rows_[r][c])) numeric[c] = false;
    }
  }
  std::size_t whole = 2 * (columns - 1);
  for (const std::size_t w : widths) whole += w;
  std::string out;
  if (most != 0 && whole > most) {
    std::size_t widest = 0;
    for (const std::string& header : rows_[0]) widest = std::max(widest, width(header));
    for (std::size_t r = 1; r < rows_.size(); ++r) {
      if (r > 1) out += "\n";
      for (std::size_t c = 0; c < columns && c < rows_[r].size(); ++c)
        if (!rows_[r][c].empty())
          out += rows_[0][c] + std::string(widest - width(rows_[0][c]) + 2, ' ') + rows_[r][c] + "\n";
    }
    return out;
  }
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text;
    for (std::size_t c = 0; c < columns; ++c) {
      const std::string cell = c < cells.size() ? cells[c] : std::string{};
      const std::string space(widths[c] - width(cell), ' ');
      text += (c == 0 ? "" : "  ") + (numeric[c] ? space + cell : cell + space);
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line(rows_[0]);
  std::vector<std::string> rule;
  for (const std::size_t w : widths) rule.emplace_back(w, '-');
  line(rule);
  for (std::size_t r = 1; r < rows_.size(); ++r) line(rows_[r]);
  return out;
}

std::string digits(double value, int significant) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*g", significant, value);
  return text;
}

}  // namespace flashjit::verify
