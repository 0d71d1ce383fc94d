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

// One row of one query head. Spans live during the visit. NaN or infinity where the exact result is, with a
// bound of 0; a bound of NaN where a key may or may not bring in NaN or infinity (error_bound.hpp, 10).
struct ReferenceRow {
  int batch = 0, head = 0, row = 0;  // row within its sequence
  bool empty = false;                // all scores are -inf, or there are none: o = 0, lse = -inf, exactly
  bool may_be_nan = false;           // o and lse, as scores are beyond what the kernel or float32 holds
  bool may_be_empty = false;         // they may be those of an empty row (for both see error_bound.hpp, 9)
  double lse = 0, lse_bound = 0;
  std::span<const double> o, o_bound;  // head_dim_v
};

// Visits rows, from several threads at once. All tensors in `args` are in host memory (their device is not
// looked at); o and lse may be absent. Throws invalid_argument if q, k, v or, with varlen, cu_seqlens are
// missing or of wrong rank.
void forward_reference(const AttentionSpec& spec, const AttentionArgs& args,
                       const std::function<void(const ReferenceRow&)>& visit,
                       const OracleOptions& options = {});

// Right: within the bound; NaN where that is exact; infinite where the exact result leaves the dtype's range.
// Undecided: nobody can tell, since the bound is no number, or since the scores are beyond what the kernel or
// float32 holds and the result is NaN, or that of a row without keys.
enum class Verdict { right, undecided, wrong };

// "right", "undecided", "wrong"
const char* to_string(Verdict verdict);

// The element that comes closest to its bound, or exceeds it most. One that is wrong is worse than one that
// is undecided.
struct Worst {
  double error = 0, bound = 0;  // |actual - expected|; NaN where only one of them is
  double actual = 0, expected = 0;
  std::string where;  // "o: batch 0, row 3, head 1, dim 5"; empty: nothing was compared
  Verdict verdict = Verdict::right;
};

struct ForwardReport {
  std::int64_t rows = 0;       // compared
  std::int64_t wrong = 0;      // elements beyond their bound
  std::int64_t undecided = 0;  // elements
  Worst o, lse;
  // Wrong if an element is; else undecided if one is.
  Verdict verdict() const;
  bool ok() const { return verdict() == Verdict::right; }
  // One line: what was compared and the worst of it.
  std::string str() const;
};

// Compares args.o and, where the spec has it, args.lse with the oracle.
ForwardReport verify_forward(const AttentionSpec& spec, const AttentionArgs& args,
                             const OracleOptions& options = {});

}  // namespace flashjit::verify
