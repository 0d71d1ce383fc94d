// The oracle of append_kv, and how far off a kernel may be. Only rows that a launch writes are visited; a row
// of the caches that several tokens write is left out. A to D are in error_bound.hpp.
//
// Exact:   a row of V, and the columns of K that are not rotated, have the bits of the new row. Pair
//          (x, y) of a token at position p becomes (x c - y s, x s + y c), where c and s are the cosine and
//          sine of p / scale * base^(-2 i / dim), or the tables' entries. 8-bit caches hold the nearest
//          element to the row divided by its scale. A scale that the launch writes is the row's largest
//          magnitude divided by the dtype's largest value, at least 2^-126.
// Kernel:  float32, each result rounded to the dtype (D).
//
// 1. Computed c and s are off by at most 2^-22: the angle, reduced in integers, by 2^-32 + 2^-34 turns (less
//    than 2^-29) at positions below 2^31, float32's rounding of the rest by 2^-25, polynomials and arithmetic
//    by 2^-23 at most. Tables' entries are exact.
// 2. Two products and a sum in float32 are off by at most 2^-23 (|x| + |y|) together, since |c|, |s| <= 1;
//    with tables 2^-23 times the larger of 1, |c| and |s|.
// 3. Numbers below 2^-126 may count as 0: 2^-125 for two products.
// 4. Where x or y is NaN or infinite, the bound is NaN.
//
// With 8-bit caches:
// 5. The scale's reciprocal is off by at most 2^-23 of itself, the product with it by 2^-24 more: 2^-22 of
//    the quotient in all, beside 1 and 2 divided by the scale. The quotient is that by the scale in memory,
//    also where the launch writes it. Reciprocals below 2^-126 may count as 0; scales below 2^-126 count as
//    0 and store 0.
// 6. Rounding to 8 bits is monotonous. So the stored element lies between those that the exact quotient
//    becomes minus and plus 5: it is the nearest one but next to a tie, and there one of two neighbours.
// 7. A written scale is off by 2^-22 of itself, beside 1 and 2 divided by the largest value. NaN counts as
//    nothing, infinity as the largest float32.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: k, v, with scales of tokens k_scale and v_scale, and, where the spec rotates Q, q_out.
Oracle append_kv_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

// A decode that appends: o and lse of the caches as the launch has left them, and the outputs of
// append_kv_oracle().
Oracle decode_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

}  // namespace flashjit::verify
