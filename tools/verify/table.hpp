// Text tables for people. A column is as wide as its widest cell; numbers are aligned to the right.
#pragma once

#include <string>
#include <vector>

namespace flashjit::verify {

class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // A header line, a rule, one line a row; every line ends in a newline.
  std::string str() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// printf's %.*g.
std::string digits(double value, int significant = 3);

}  // namespace flashjit::verify
