// The float64 oracles compute every operation the plain way and say how far off a kernel may be. They share
// nothing with templates/; masks are written here a second time.
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

// Whether a query row sees a key. Both count from their sequence's start.
using Keep = std::function<bool(int batch, int head, int row, int key)>;

struct OracleOptions {
  std::int64_t max_rows =
      0;  // 0: every row. Otherwise about so many, spread over all heads, first and last included
  std::uint64_t seed = 0;  // seed of the choice of rows
  int num_threads = 0;     // 0: one for each processor
  // The rest is for the forward and the backward only.
  Keep keep;                     // one more mask beside the spec's masks
  bool repeated_scores = false;  // rows hold many equal scores: forward_bound.hpp, 5
  // Times log2(e); NaN is no wrong result of rows whose maximum is beyond: forward_bound.hpp, 9.
  double largest_score = HUGE_VAL;
  bool rounds_keys = false;  // those of fp8_ds_mla: forward_bound.hpp, 17
};

// An output tensor of an operation.
struct Output {
  std::string name;  // the argument's name
  std::vector<std::int64_t> shape;
  std::optional<Tensor> actual;            // the kernel's result, in host memory
  std::vector<const char*> coordinates{};  // names of Expected::place
};

// Consecutive elements of an output. Spans live during the visit. If the exact result is NaN or infinite, the
// value is too and its bound is 0. If the exact result cannot be told, the bound is NaN.
struct Expected {
  std::size_t output = 0;  // of Oracle::outputs
  // The first element's coordinates and its index in Output::actual. The last coordinate counts on from
  // element to element.
  std::array<std::int64_t, 4> place = {};
  std::int64_t index = 0;
  std::span<const double> values, bounds;
  // Results that are excused, because float32 may not hold the terms of the values.
  bool may_be_nan = false;
  std::optional<double> may_be = {};
};

using Visit = std::function<void(const Expected&)>;

// The oracle of an operation on one launch's data.
struct Oracle {
  std::vector<Output> outputs;
  // Visits the elements of all outputs, or of the chosen rows, from several threads at once.
  std::function<void(const Visit&)> compute;
};

// The oracle of the spec's operation. All tensors in `args` are in host memory, whatever their device fields
// say, and must outlive the oracle. Outputs may be absent if they are not compared. Throws invalid_argument
// if an input is missing or has the wrong rank.
Oracle oracle_of(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options = {});

}  // namespace flashjit::verify
