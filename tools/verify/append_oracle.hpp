// The oracle of append_kv, and how far off a kernel may be. Only rows that a launch writes are visited; a row
// of the caches that several tokens write is left out. A to D are in error_bound.hpp.
//
// Exact:   a row of V, and the columns of K that are not rotated, have the bits of the new row. Pair (x, y)
// of
//          a token at position p becomes (x c - y s, x s + y c), where c and s are the cosine and sine of
//          p / scale * base^(-2 i / dim), or the tables' entries.
// Kernel:  float32, each result rounded to the dtype (D).
//
// 1. Computed c and s are off by at most 2^-22: the angle, reduced in integers, by 2^-32 + 2^-34 turns (less
//    than 2^-29) at positions below 2^31, float32's rounding of the rest by 2^-25, polynomials and arithmetic
//    by 2^-23 at most. Tables' entries are exact.
// 2. Two products and a sum in float32 are off by at most 2^-23 (|x| + |y|) together, since |c|, |s| <= 1;
// with
//    tables 2^-23 times the larger of 1, |c| and |s|.
// 3. Numbers below 2^-126 may count as 0: 2^-125 for two products.
// 4. Where x or y is NaN or infinite, the bound is NaN.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: k, v and, where the spec rotates Q, q_out.
Oracle append_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
