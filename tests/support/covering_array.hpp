// Covering arrays of strength three: few rows that together hold each combination of values of each three
// axes (Cohen et al., "The AETG system", 1997: greedy, row by row).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace flashjit::testing_support {

// A value of each axis. Value 0 is the one that asks for nothing.
using Row = std::vector<int>;

// A set of triples of values of three axes, whose numbers of values are `sizes`.
class Triples {
 public:
  using Triple = std::array<std::array<int, 2>, 3>;  // axis and value, by ascending axis

  explicit Triples(std::vector<int> sizes);
  // Adds those of a row; returns how many of them are new.
  std::size_t add(const Row& row);
  bool add(const Triple& triple);
  bool has(const Triple& triple) const;
  // How many of a row's the set lacks.
  std::size_t lacks(const Row& row) const;
  std::size_t count() const { return count_; }
  // Calls visit(triple) for each triple of values of different axes, whether the set has it or not.
  void for_each(const std::function<void(const Triple&)>& visit) const;

 private:
  std::size_t place(int axis, int value) const { return static_cast<std::size_t>(first_[axis] + value); }
  static void for_each_of(const Row& row, const auto& visit);
  std::size_t place(const Triple& triple) const;

  std::vector<int> sizes_, first_;
  std::size_t values_ = 0, count_ = 0;
  std::vector<bool> has_;
};

struct CoveringArray {
  std::vector<Row> rows;  // those that add most come first
  Triples covered;        // of the rows
};

// An array of all triples that some possible row has. `is_possible` is asked for whole rows, thousands of
// times; the row of zeros must be possible. Triples for which no possible row is found count as impossible.
// Equal seeds give equal arrays.
CoveringArray covering_array(const std::vector<int>& sizes, std::uint64_t seed,
                             const std::function<bool(const Row&)>& is_possible);

}  // namespace flashjit::testing_support
