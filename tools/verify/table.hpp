// Text tables for people. A column is as wide as its widest cell; numbers are aligned to the right.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace flashjit::verify {

class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  // A header line, a rule, one line a row; every line ends in a newline. A table that is wider than `columns`
  // has a line for each cell instead, with the header before it, and an empty line between rows. 0: any
  // width.
  std::string str(std::size_t columns = 0) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// printf's %.*g.
std::string digits(double value, int significant = 3);

}  // namespace flashjit::verify
