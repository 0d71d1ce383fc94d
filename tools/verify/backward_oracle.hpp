// The oracle of backward, and how far off a correct backward may be. A and D are those of error_bound.hpp.
//
// Exact, for the pairs of a row i and a key j that the mask keeps, from the inputs as stored (o and lse are
// inputs; a row whose lse is -inf has no weights):
//   p_ij = exp(scale q_i.k_j - lse_i),  w_ij = m_ij p_ij,  g_ij = p_ij (m_ij do_i.v_j - delta_i),
//   delta_i = do_i.o_i - dlse_i,  m_ij = 1, with dropout 0 or 1 / (1 - p)
//   dv_j = sum_i w_ij do_i,  dk_j = scale sum_i g_ij q_i,  dq_i = scale sum_j g_ij k_j
// where dk and dv add up the query heads of a key/value head.
// Kernel: all of it in float32; w and g may be rounded to an input's dtype of 16 bits before the products.
//
// 1. The exponent is off by d_ij <= gamma(head_dim) scale |q_i||k_j| + 2^-22 (|s_ij| + |lse_i| + 1), and p_ij
//    by a factor of exp(d_ij + x) at most; x is 2^-21, for 16-bit inputs 2^-13. So e_ij = exp(d_ij + x) - 1.
//    Below 2^-126 float32 runs out of exponent: f, absolute.
// 2. do_i.v_j is off by gamma(head_dim_v) |do_i||v_j| + head_dim_v f, delta_i by
//    gamma(head_dim_v) |do_i||o_i| + 2^-22 (|delta_i| + |dlse_i|) + (head_dim_v + |do_i|) f. CPU kernels take
//    numbers below f for 0, as operands (elements of o) and as results.
// 3. So g_ij is off by a_ij = |g_ij| e_ij + (p_ij (1 + e_ij) + f) (m times the first of 2 + the second)
//    + (p_ij 2^-22 + f) (|m do_i.v_j| + |delta_i|) + f.
// 4. Rounding to 16 bits adds at most r |w_ij| + f_r, or r |g_ij| + f_r. These are independent, of mean 0:
//    their sum is below 4 sqrt(sum of squares), ten standard deviations, as in forward_bound.hpp, 5. With
//    OracleOptions::repeated_scores the worst case counts.
// 5. A sum of n terms is off by gamma(n) of the sum of magnitudes and by n f, and its product with scale by
//    f more. The output is rounded: D.
//
// With formulas of scores and sinks:
//
// 6. s_ij is the final score, with the error that formula.hpp gives it in place of the product's, and
//    g_ij = g'_ij D_ij, where g'_ij is the gradient by the final score, as above, and D_ij the final score's
//    derivative by the raw one. It is off by |g'_ij| E_ij + a_ij (|D_ij| + E_ij) + 2^-23 |g_ij| + f with the
//    bound E_ij of D_ij (formula.hpp). A pair whose weight float32 cannot hold, and a score of -inf, give 0.
// 7. An element of a table gets the sum of g'_ij times the final score's derivative by it, over all pairs and
// all
//    places where a formula reads it. Terms are off as in 6, their sum as in 5.
// 8. A sink logit t gets -sum_i exp(t - lse_i) delta_i. A term is off by the factor exp(2^-22 (|t| + |lse_i|
// + 1) +
//    2^-21) and by delta_i's error.
//
// An element whose exact value is NaN or infinite cannot be told.
#pragma once

#include "tools/verify/oracle.hpp"

namespace flashjit::verify {

// Outputs: dq, dk, dv, then the gradients of tables, and d_sink_logits. OracleOptions::max_rows counts rows
// of dq, and keys of dk and dv; tables and sink logits take all rows.
Oracle backward_oracle(const AttentionSpec& spec, const AttentionArgs& args, const OracleOptions& options);

// Computes o and lse of `args`, inputs of a backward in host memory, in float64 from q, k and v.
void fill_forward(const AttentionSpec& spec, const AttentionArgs& args);

}  // namespace flashjit::verify
