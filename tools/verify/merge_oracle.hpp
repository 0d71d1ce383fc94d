// Merging n partial results of attention into one, and how far off a merge may be. A to D are those of
// error_bound.hpp.
//
// Exact:   lse = ln sum_i exp(l_i),  o_c = sum_i p_i o_ic  with  p_i = exp(l_i - lse), from the parts as
//          stored. A part whose l_i is -infinity counts as nothing, whatever its o_i holds; if all do,
//          o = 0 and lse = -infinity.
// Kernel:  everything in float32, o rounded to its dtype. Order and grouping are its own: all parts against
//          their maximum, one after the other with a running maximum, or pairs into pairs.
//
// 1. A merge weighs part i by exp(l_i - L), where L is the largest l of those merged, their lse, or a number
//    between. The folds of log2(e) into l_i and L, their difference, and the rounding of L, where it goes on
//    into another merge, are off by at most 2^-22 (|l_i| + |lse| + 1) together: whatever is merged with part
//    i, L lies between l_i and the lse of all, so |L| is at most the larger of |l_i| and |lse|.
// 2. exp has relative error x = 2^-21. No weight is rounded to 16 bits here, so whatever the dtype of the
//    parts, the cubic of forward_bound.hpp, 3 is not good enough.
// 3. A part goes through at most n merges; empty parts are counted, as a kernel may walk them. Their errors
//    may have the same sign (constants, the same argument of exp again and again), so they add up:
//    D_i = n (x + 2^-22 (|l_i| + |lse| + 1)).
// 4. So part i's weight has a relative error of e_i <= exp(D_i) - 1 + gamma(n), and at most f = 2^-126 beside
//    where float32 runs out of exponent. B gives lse, and o before it is rounded. Sums of numbers below
//    2^-126 are off by n 2^-149 at most.
// 5. Wide merges, of lse beyond about 1e5 / n: C. A kernel must divide by the sum of its own weights there;
//    exp(l_i - lse) with a rounded lse is no part of a whole.
// 6. D rounds o.
//
// No errors of sums are these:
//
// 7. Range. Where |l_i| log2(e) exceeds FLT_MAX, NaN is no wrong result of that row; where that holds for all
//    its parts and none is above 0, an empty row is none either.
// 8. NaN and infinity. An l_i of NaN or +infinity makes the row's o and lse NaN. Where an o_ic of a part that
//    counts is NaN or infinite, o_c is what IEEE 754 has for the sum, if each such part has a weight that
//    cannot vanish: p_i (1 - e_i) > 2 f. If one may vanish, the bound is NaN.
//
// Tight: a missing part, and an exponent or a weight that is wrong by 1%, exceed it
// (tests/support/merge_oracle_test.cpp).
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// The parts, in host memory, by strides in elements. Packed ones are those of a single batch entry.
struct MergeParts {
  int parts, batch, seqlen_q, heads, head_dim_v;
  const void* o;  // [parts, batch, seqlen_q, heads, head_dim_v], the last contiguous
  DType o_dtype;
  std::array<std::int64_t, 4> o_strides;
  const float* lse;  // [parts, batch, heads, seqlen_q]
  std::array<std::int64_t, 4> lse_strides;
};

// Outputs: o [batch, seqlen_q, heads, head_dim_v] and, unless absent, lse [batch, heads, seqlen_q].
Oracle merge_oracle(const MergeParts& parts, const Tensor& o, const std::optional<Tensor>& lse,
                    const OracleOptions& options = {});

// From the arguments of a launch: parts_o and parts_lse into o and, where the spec has it, lse.
Oracle merge_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
