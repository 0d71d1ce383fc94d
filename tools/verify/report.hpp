// Compares the results of any operation with its oracle.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Right: within the bound; NaN if the exact result is NaN; infinite if the exact result leaves the dtype's
// range. Undecided: the bound is NaN, or Expected excuses the result.
enum class Verdict { right, undecided, wrong };

// "right", "undecided", "wrong"
const char* to_string(Verdict verdict);

// The element of an output that comes closest to its bound or exceeds it most. A wrong element is worse than
// an undecided one.
struct Worst {
  std::string output;           // its name
  double error = 0, bound = 0;  // error: |actual - expected|; NaN if only one of them is NaN
  double actual = 0, expected = 0;
  std::string where{};  // "o: batch 0, row 3, head 1, dim 5"; empty: nothing was compared
  Verdict verdict = Verdict::right;
};

struct Report {
  std::int64_t rows = 0;       // compared rows of the first output
  std::int64_t wrong = 0;      // elements beyond their bound
  std::int64_t undecided = 0;  // elements
  std::vector<Worst> worst;    // one for each output, in the oracle's order
  // Throws invalid_argument if there is no such output.
  const Worst& of(std::string_view output) const;
  // Wrong if an element is wrong; else undecided if an element is undecided.
  Verdict verdict() const;
  bool ok() const { return verdict() == Verdict::right; }
  // One line: how many rows were compared, and the worst element of each output.
  std::string str() const;
};

// Compares every output with the kernel's result. Throws invalid_argument if the result is missing or has
// another shape.
Report compare(const Oracle& oracle);

// compare() with the oracle of the spec's operation.
Report verify_outputs(const AttentionSpec& spec, const AttentionArgs& args,
                      const OracleOptions& options = {});

}  // namespace flashjit::verify
