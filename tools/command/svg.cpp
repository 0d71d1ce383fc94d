#include "tools/command/svg.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace flashjit::command {
namespace {

// The value with so many decimals and no trailing zeros.
std::string shortest(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  std::string out = text;
  if (out.find('.') == std::string::npos) return out;
  while (out.back() == '0') out.pop_back();
  if (out.back() == '.') out.pop_back();
  return out == "-0" ? "0" : out;
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string coordinate(double value) {
  return shortest(value, 2);
}

std::vector<double> ticks(double most, int count) {
  const double rough = most / count, power = std::pow(10, std::floor(std::log10(rough)));
  double step = power;
  for (const double factor : {1, 2, 5, 10}) {
    step = factor * power;
    if (step >= rough * (1 - 1e-9)) break;
  }
  std::vector<double> values = {0};
  for (int i = 1; values.back() < most * (1 - 1e-9); ++i) values.push_back(i * step);
  return values;
}

std::vector<double> powers_of_ten(double least, double most) {
  std::vector<double> values;
  for (double exponent = std::ceil(std::log10(least)); exponent <= std::log10(most); ++exponent)
    values.push_back(std::pow(10, exponent));
  return values;
}

std::string tick_label(double value) {
  return shortest(value, 6);
}

std::vector<std::string> wrapped(const std::string& text, const std::string& separator, std::size_t width) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(separator, begin), text.size());
    const std::string piece = text.substr(begin, end - begin);
    begin = end + separator.size();
    if (lines.empty() || lines.back().size() + separator.size() + piece.size() > width) {
      lines.push_back(piece);
    } else {
      lines.back() += separator + piece;
    }
  }
  return lines;
}

}  // namespace flashjit::command
