// The oracle of merging n partial results of attention into one, and how far off a merge may be. A to D are
// in error_bound.hpp.
//
// Exact:   lse = ln sum_i exp(l_i),  o_c = sum_i p_i o_ic  with  p_i = exp(l_i - lse), from the parts as
//          stored. A part whose l_i is -infinity does not count, whatever its o_i holds. If no part
//          counts, o = 0 and lse = -infinity.
// Kernel:  everything in float32, o rounded to its dtype. It may merge in any order and grouping: all parts
//          against their maximum, one after the other with a running maximum, or pairs into pairs.
//
// 1. A merge weighs part i by exp(l_i - L), where L is the largest l of those merged, their lse, or a number
//    between. The folds of log2(e) into l_i and L, their difference, and the rounding of L, where it goes on
//    into another merge, are off by at most 2^-22 (|l_i| + |lse| + 1) together: whatever is merged with part
//    i, L lies between l_i and the lse of all, so |L| is at most the larger of |l_i| and |lse|.
// 2. exp has relative error x = 2^-21. No weight is rounded to 16 bits here, so the cubic in 3 of
//    forward_bound.hpp is not exact enough, whatever the parts' dtype.
// 3. A part goes through at most n merges; empty parts are counted, because a kernel may merge them, too.
//    Their errors may have the same sign (constants, the same argument of exp again and again), so they
//    add up: D_i = n (x + 2^-22 (|l_i| + |lse| + 1)).
// 4. So part i's weight has a relative error of e_i <= exp(D_i) - 1 + gamma(n), and at most f = 2^-126 beside
//    where float32 runs out of exponent. B gives lse, and o before it is rounded. Sums of numbers below
//    2^-126 are off by n 2^-149 at most.
// 5. C bounds wide merges, whose lse is beyond about 1e5 / n. A kernel must divide by the sum of its own
//    weights there; exp(l_i - lse) with a rounded lse is no part of a whole.
// 6. D rounds o.
//
// Two cases are no errors of sums:
//
// 7. Range. If |l_i| log2(e) exceeds FLT_MAX, NaN is no wrong result of that row. If this holds for all parts
//    of the row and none is above 0, an empty row is no wrong result either.
// 8. NaN and infinity. An l_i of NaN or +infinity makes the row's o and lse NaN. Where an o_ic of a part that
//    counts is NaN or infinite, o_c is what IEEE 754 has for the sum, if each such part has a weight that
//    cannot vanish: p_i (1 - e_i) > 2 f. If one may vanish, the bound is NaN.
//
// 9. A sum: every weight is 1. Float32 additions of n parts in any order are off by gamma(n) sum_i |o_ic| at
//    most (error_bound.hpp), and D rounds o.
//
// Tight: a missing part, and an exponent or a weight that is wrong by 1%, exceed it
// (tests/support/merge_oracle_test.cpp).
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// The parts in host memory; strides count elements. Packed parts are views of a single batch entry.
struct MergeParts {
  int parts, batch, seqlen_q, heads, head_dim_v;
  const void* o;  // [parts, batch, seqlen_q, heads, head_dim_v]; the last dimension is contiguous
  DType o_dtype;
  std::array<std::int64_t, 4> o_strides;
  const float* lse;  // [parts, batch, heads, seqlen_q]; null: the parts are added as they are
  std::array<std::int64_t, 4> lse_strides;
};

// Outputs: o [batch, seqlen_q, heads, head_dim_v] and, unless absent, lse [batch, heads, seqlen_q].
Oracle merge_oracle(const MergeParts& parts, const Tensor& o, const std::optional<Tensor>& lse,
                    const OracleOptions& options = {});

// The oracle from a launch's arguments: merges parts_o and parts_lse into o, and into lse if the spec has it.
Oracle merge_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
