// The float64 oracles: what every operation means, computed the plain way, and how far off a kernel may be.
// They share nothing with templates/: masks are written here a second time.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/flashjit.hpp"

namespace flashjit::verify {

// Whether a query row sees a key, both within their sequence.
using Keep = std::function<bool(int batch, int head, int row, int key)>;

struct OracleOptions {
  std::int64_t max_rows =
      0;  // 0: every row. Otherwise about so many, spread over all heads, first and last included
  std::uint64_t seed = 0;  // of that choice
  int num_threads = 0;     // 0: one a processor
  // For the forward:
  Keep keep;                     // a mask beside those of the spec
  bool repeated_scores = false;  // rows hold many equal scores: forward_bound.hpp, 5
  // Times log2(e); NaN is no wrong result of rows whose maximum is beyond: forward_bound.hpp, 9.
  double largest_score = HUGE_VAL;
};

// A tensor that an operation writes.
struct Output {
  std::string name;  // the argument's
  std::vector<std::int64_t> shape;
  std::optional<Tensor> actual;            // what a kernel has written, in host memory
  std::vector<const char*> coordinates{};  // names of Expected::place
};

// Consecutive elements of an output. Spans live during the visit. NaN or infinity where the exact result is,
// with a bound of 0; a bound of NaN where nobody can tell the result.
struct Expected {
  std::size_t output = 0;  // of Oracle::outputs
  // Where the first element is: by the output's coordinates, of which the last counts on, and in
  // Output::actual.
  std::array<std::int64_t, 4> place = {};
  std::int64_t index = 0;
  std::span<const double> values, bounds;
  // Results that nobody can call wrong, as float32 may not hold what leads to the values.
  bool may_be_nan = false;
  std::optional<double> may_be = {};
};

using Visit = std::function<void(const Expected&)>;

// An operation on one launch's data.
struct Oracle {
  std::vector<Output> outputs;
  // Visits the elements of all outputs, or of the chosen rows, from several threads at once.
  std::function<void(const Visit&)> compute;
};

// The oracle of the spec's operation. All tensors in `args` are in host memory (their device is not looked
// at) and live as long as the oracle is used; outputs may be absent if nobody compares with them. Throws
// invalid_argument if inputs are missing or of wrong rank, unsupported for an operation without an oracle.
Oracle oracle_of(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options = {});

}  // namespace flashjit::verify
