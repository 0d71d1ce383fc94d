// The oracle of backward, and how far off a correct backward may be. A, C and D are those of error_bound.hpp.
//
// Exact, for the pairs of a row i and a key j that the mask keeps, from the inputs as stored (o is an input;
// a row whose lse is -inf, or whose do and dlse are 0, gives nothing):
//   p_ij = exp(s_ij) / sum_k exp(s_ik),  s_ij = scale q_i.k_j,
//   w_ij = m_ij p_ij,  g_ij = p_ij (m_ij do_i.v_j - delta_i),
//   delta_i = do_i.o_i - dlse_i,  m_ij = 1, with dropout 0 or 1 / (1 - p)
//   dv_j = sum_i w_ij do_i,  dk_j = scale sum_i g_ij q_i,  dq_i = scale sum_j g_ij k_j
// where dk and dv add up the query heads of a key/value head. If the lse that is given exceeds that of the
// row's scores by more than a forward may err, it is a merge's, of more keys than these: then
// p_ij = exp(s_ij - lse_i).
// Kernel: all of it in float32; w and g may be rounded to an input's dtype of 16 bits before the products.
//
// 1. Scores are off by d_ij <= gamma(head_dim) scale |q_i||k_j|, exponentials by a factor of exp(x): x is
//    2^-21, for 16-bit inputs 2^-13. How far a weight may be off depends on where the kernel has the row's
//    sum from (row_softmax.hpp):
//    - From lse, if |lse_i| <= 2^13. The exponent is off by
//      D_ij = d_ij + x + 2^-22 (|s_ij| + |lse_i| + 1) + |lse_i - ln sum_k exp(s_ik)|,
//      and p_ij by a factor of exp(D_ij).
//    - Beyond, the rounding of lse alone would cost more than 2^-8, and at 2^24 float32 holds nothing of
//      ln(n). The kernel has to find maximum and sum again. So weights sum to 1, whatever their errors, as in
//      C, and with D_ij = d_ij + x + 2^-22 (|s_ij - max_i| + |lse_i - max_i| + 1) + gamma(n) a weight is
//      between 1 / (1 + sum_{k != j} exp(s_ik + D_ik - s_ij + D_ij)) and the same with -D. It never
//      exceeds 1. Where scores are further off than they are apart, float32 cannot tell which of them leads:
//      weights between 0 and 1 are right then. The only key of a row has the weight 1.
//    Scores beyond float32, and on GPUs rows with |max_i| log2(e) > 2^26 (OracleOptions::largest_score),
//    cannot be told. e_ij is the error of p_ij, relative. Below 2^-126 float32 runs out of exponent: f,
//    absolute.
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
//    bound E_ij of D_ij (formula.hpp). A pair whose weight float32 cannot hold, and a score of -inf, give 0,
//    but for rows in which a score is NaN or +inf: none of their weights is a number.
// 7. An element of a table gets the sum of g'_ij times the final score's derivative by it, over all pairs and
//    all places where a formula reads it. Terms are off as in 6, their sum as in 5.
// 8. A sink is one more key of a row, with an exact score t. A sink logit gets minus the sum of its weights
//    times delta_i. A term is off by the error of the weight and by that of delta_i.
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
