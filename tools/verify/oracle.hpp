// The float64 oracle: what every kernel means, computed the plain way, row by row, and how far off a kernel
// may be. Shares nothing with templates/: masks are written here a second time.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "runtime/flashjit.hpp"
#include "tools/verify/error_bound.hpp"

namespace flashjit::verify {

// Whether a query row sees a key, both within their sequence.
using Keep = std::function<bool(int batch, int head, int row, int key)>;

struct OracleOptions {
  std::int64_t max_rows =
      0;  // 0: every row. Otherwise about so many, spread over all heads, first and last included
  std::uint64_t seed = 0;  // of that choice
  int num_threads = 0;     // 0: one a processor
  Keep keep;               // a mask beside those of the spec
  BoundOptions bound;
};

// One row of one query head. Spans live during the visit.
struct ReferenceRow {
  int batch = 0, head = 0, row = 0;  // row within its sequence
  bool empty = false;                // sees no key: o = 0, lse = -inf, exactly
  double lse = 0, lse_bound = 0;
  std::span<const double> o, o_bound;  // head_dim_v
};

// Visits rows, from several threads at once. All tensors in `args` are in host memory (their device is not
// looked at); o and lse may be absent. Throws invalid_argument if q, k, v or, with varlen, cu_seqlens are
// missing or of wrong rank.
void forward_reference(const AttentionSpec& spec, const AttentionArgs& args,
                       const std::function<void(const ReferenceRow&)>& visit,
                       const OracleOptions& options = {});

// The element that comes closest to its bound, or exceeds it most.
struct Worst {
  double error = 0, bound = 0;  // |actual - expected|; NaN where actual is
  double actual = 0, expected = 0;
  std::string where;  // "o[batch 0, row 3, head 1, dim 5]"; empty: nothing was compared
  bool ok() const { return error <= bound; }
};

struct ForwardReport {
  std::int64_t rows = 0;   // compared
  std::int64_t wrong = 0;  // elements beyond their bound
  Worst o, lse;
  bool ok() const { return wrong == 0; }
  // One line: what was compared and the worst of it.
  std::string str() const;
};

// Compares args.o and, where the spec has it, args.lse with the oracle.
ForwardReport verify_forward(const AttentionSpec& spec, const AttentionArgs& args,
                             const OracleOptions& options = {});

}  // namespace flashjit::verify
