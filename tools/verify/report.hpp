// Results beside what an oracle expects, whatever the operation.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Right: within the bound; NaN where that is exact; infinite where the exact result leaves the dtype's range.
// Undecided: nobody can tell, since the bound is no number, or since the result is one that Expected excuses.
enum class Verdict { right, undecided, wrong };

// "right", "undecided", "wrong"
const char* to_string(Verdict verdict);

// The element of an output that comes closest to its bound, or exceeds it most. One that is wrong is worse
// than one that is undecided.
struct Worst {
  std::string output;           // its name
  double error = 0, bound = 0;  // |actual - expected|; NaN where only one of them is
  double actual = 0, expected = 0;
  std::string where{};  // "o: batch 0, row 3, head 1, dim 5"; empty: nothing was compared
  Verdict verdict = Verdict::right;
};

struct Report {
  std::int64_t rows = 0;       // compared, of the first output
  std::int64_t wrong = 0;      // elements beyond their bound
  std::int64_t undecided = 0;  // elements
  std::vector<Worst> worst;    // one an output, in the oracle's order
  // Throws invalid_argument if there is no such output.
  const Worst& of(std::string_view output) const;
  // Wrong if an element is; else undecided if one is.
  Verdict verdict() const;
  bool ok() const { return verdict() == Verdict::right; }
  // One line: what was compared and the worst of each output.
  std::string str() const;
};

// Compares every output with what a kernel has written. Throws invalid_argument if that is missing or of
// another shape.
Report compare(const Oracle& oracle);

// compare() with the oracle of the spec's operation.
Report verify_outputs(const AttentionSpec& spec, const AttentionArgs& args,
                      const OracleOptions& options = {});

}  // namespace flashjit::verify
